"""The patch on stand-ins of every version: what is marked when the patched definition runs, and what becomes of the files."""

import hashlib
import os
import stat
import sys

import numpy as np
import pytest
from packaging.version import Version
from upstream_network import HEAD, STATES, Mapping, loaded, model_of, normed
from upstream_source import VERSIONS, decilm_path, definition_path

from model_patches import edit, patch
from model_patches.anchor import DECODER
from tensorrt_llm_ext.errors import PatchError

IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5])
LAST = np.array([3, 5, 9])  # lengths 3, 2, 4: 1-based inclusive prefix sums
OURS = {"final_post_all", "final_post_last"}


def run(path, class_name="DecoderModelForCausalLM", *, mapping=None, dtype="float16", **inputs):
    """Run a definition; return its network and what forward returned."""
    with loaded(path) as module:
        model = model_of(module, class_name, mapping, dtype)
        return model.network, model.forward(IDS, **{"last_token_ids": LAST, **inputs})


def states_by_path(statuses):
    return {status.target.class_name: status.state for status in statuses}


# What a patched definition does


def test_every_row_and_each_sequences_last_row_become_outputs_after_the_norm(site):
    patch.apply(site)
    network, _ = run(definition_path(site.folder))
    outputs = network.outputs()
    assert outputs.keys() == {"logits"} | OURS and network.num_marks == 3
    np.testing.assert_array_equal(outputs["final_post_all"].array, normed(STATES[IDS]))
    np.testing.assert_array_equal(outputs["final_post_last"].array, normed(STATES[IDS])[[2, 4, 8]])
    np.testing.assert_array_equal(outputs["logits"].array, (normed(STATES[IDS])[[2, 4, 8]] @ HEAD).astype(np.float32))


@pytest.mark.parametrize("inputs", [{}, {"use_cache": True}, {"last_token_ids": None}], ids=str)
def test_the_graph_and_what_forward_returns_stay_as_they_were(site, inputs):
    network, returned = run(definition_path(site.folder), **inputs)
    patch.apply(site)
    network_after, returned_after = run(definition_path(site.folder), **inputs)
    assert network_after.operators == network.operators
    assert network_after.outputs().keys() - OURS == network.outputs().keys()
    assert len(returned_after) == len(returned)
    assert len(returned) == (3 if site.version >= Version("0.15.dev0") or "use_cache" in inputs else 2)
    for before, after in zip(returned, returned_after, strict=True):
        if not isinstance(before, list):  # presents
            np.testing.assert_array_equal(before.array, after.array)


def test_where_nothing_is_gathered_the_one_tensor_is_marked_once(site):
    patch.apply(site)
    network, _ = run(definition_path(site.folder), last_token_ids=None)  # --gather_context_logits
    assert network.outputs().keys() == {"logits", "final_post_all"} and network.num_marks == 2
    np.testing.assert_array_equal(network.outputs()["final_post_all"].array, normed(STATES[IDS]))


def test_a_rank_that_is_not_the_last_gets_no_output_of_ours(site):
    patch.apply(site)
    network, _ = run(definition_path(site.folder), mapping=Mapping(is_last=False))
    assert network.outputs().keys() == {"hidden_states_output"}


@pytest.mark.parametrize("site", VERSIONS[3:], indirect=True)  # context parallelism came with 0.16
def test_a_context_parallel_rank_gives_the_whole_sequence(site):
    patch.apply(site)
    network, _ = run(definition_path(site.folder), mapping=Mapping(cp_size=2, cp_rank=1))
    np.testing.assert_array_equal(network.outputs()["final_post_all"].array, normed(STATES[IDS]))


def test_the_outputs_have_the_models_dtype_so_no_cast_is_added(site):
    patch.apply(site)
    network, _ = run(definition_path(site.folder))
    assert network.outputs()["final_post_all"].dtype == "float16"
    assert network.operators.count("cast") == 1  # the logits' own


def test_a_class_that_calls_the_decoders_forward_has_the_outputs_too(site):
    patch.apply(site)
    assert run(definition_path(site.folder), "EagleForCausalLM")[0].outputs().keys() == {"logits"} | OURS


def test_decilm_is_patched_by_a_rule_of_its_own(site):
    patch.apply(site)
    network, returned = run(decilm_path(site.folder), "DeciLMForCausalLM")
    assert network.outputs().keys() == {"logits"} | OURS and len(returned) == 2
    np.testing.assert_array_equal(network.outputs()["final_post_last"].array, normed(STATES[IDS])[[2, 4, 8]])


# The files


def test_six_lines_or_fewer_are_inserted_and_every_other_byte_stays(site):
    path = definition_path(site.folder)
    before = path.read_bytes().splitlines(keepends=True)
    shown = [line.number for line in patch.status(site)[0].lines]
    patch.apply(site)
    after = path.read_bytes().splitlines(keepends=True)
    assert len(after) - len(before) == len(shown) <= 6
    assert [line for number, line in enumerate(after, 1) if number not in shown] == before


def test_revert_gives_every_byte_back(site):
    paths = [definition_path(site.folder), decilm_path(site.folder)]
    before = [path.read_bytes() for path in paths]
    assert set(states_by_path(patch.apply(site)).values()) == {"patched"}
    assert [path.read_bytes() for path in paths] != before
    assert set(states_by_path(patch.revert(site)).values()) == {"unpatched"}
    assert [path.read_bytes() for path in paths] == before


def test_the_restored_bytes_are_proven_by_their_hash(one_site):
    source = definition_path(one_site.folder).read_bytes()
    patched = edit.patched(source, DECODER, one_site.version)
    assert edit.restored(patched, DECODER) == source
    for damaged in (patched + b"\n", source):
        with pytest.raises(PatchError, match="changed after it was patched"):
            edit.restored(damaged, DECODER)


def test_the_patched_file_carries_the_hash_of_the_one_it_was(one_site):
    before = definition_path(one_site.folder).read_bytes()
    line = patch.apply(one_site)[0].lines[0].text
    assert line.endswith("sha256:" + hashlib.sha256(before).hexdigest())


def test_applying_and_reverting_twice_writes_nothing_the_second_time(one_site):
    path = definition_path(one_site.folder)
    for verb in (patch.apply, patch.revert):
        verb(one_site)
        before = path.stat()
        verb(one_site)
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_the_mode_of_the_file_is_kept_and_a_hard_linked_cache_is_not_touched(one_site, tmp_path):
    path = definition_path(one_site.folder)
    path.chmod(0o640)
    os.link(path, tmp_path / "cached.py")
    before = path.read_bytes()
    patch.apply(one_site)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert (tmp_path / "cached.py").read_bytes() == before != path.read_bytes()


def test_the_bytes_are_on_disk_before_the_name_is_theirs_and_the_name_after_it(one_site, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: calls.append(name) or real(*given))
    patch.apply(one_site)
    assert calls == ["fsync", "replace", "fsync"] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_of_the_file_is_kept(one_site):
    path = definition_path(one_site.folder)
    os.chown(path, 1234, 2345)
    patch.apply(one_site)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


@pytest.mark.parametrize(
    "change",
    [
        lambda source: source.replace(b"\n", b"\r\n"),
        lambda source: source.replace(b"\n", b"\r"),
        lambda source: b"\xef\xbb\xbf" + source,
        lambda source: b"# -*- coding: latin-1 -*-\n# d\xe9codeur\n" + source,
        lambda source: source.replace(b"    ", b"\t"),
        lambda source: source.replace(b"\n\nclass", b"\n\x0c\n# a\x0bb\xe2\x80\xa8c\nclass"),
        lambda source: source.rstrip(b"\n"),
        lambda source: b"\n\n\n" + source,
    ],
    ids=["crlf", "cr", "bom", "latin-1", "tabs", "odd-line-breaks", "no-last-newline", "moved"],
)
def test_line_ends_encoding_and_indentation_are_kept(one_site, change):
    path = definition_path(one_site.folder)
    path.write_bytes(change(path.read_bytes()))
    before = path.read_bytes()
    patch.apply(one_site)
    assert run(path)[0].outputs().keys() == {"logits"} | OURS
    assert (
        len({len(line) - len(line.rstrip(b"\r\n")) for line in path.read_bytes().splitlines(keepends=True)[:-1]}) == 1
    )
    patch.revert(one_site)
    assert path.read_bytes() == before


def test_upstream_is_never_imported(one_site):
    patch.apply(one_site), patch.revert(one_site)
    assert not any(name.startswith("tensorrt_llm.") or name == "tensorrt_llm" for name in sys.modules)
