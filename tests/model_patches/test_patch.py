"""The patch on stand-ins of every version: what is marked when the patched definition runs, and what it refuses."""

import ast
import errno
import hashlib
import os
import stat
import sys

import numpy as np
import pytest
from packaging.version import Version
from upstream_network import HEAD, STATES, Mapping, loaded, model_of, normed
from upstream_source import VERSIONS, decilm_path, definition_path, write_upstream

import model_patches
from model_patches import edit, find_site, patch
from model_patches.anchor import DECODER, find_anchor
from tensorrt_llm_ext.errors import PatchError

IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5])
LAST = np.array([3, 5, 9])  # lengths 3, 2, 4: 1-based inclusive prefix sums
OURS = {"final_post_all", "final_post_last"}


@pytest.fixture(params=VERSIONS)
def site(request, tmp_path):
    return find_site(write_upstream(tmp_path, request.param))


@pytest.fixture
def one_site(tmp_path):
    return find_site(write_upstream(tmp_path, "0.16.0"))


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


# What is refused

ANCHOR = "hidden_states = gather_last_token_logits(\n                hidden_states, last_token_ids,"
LAST_RANK = "        if self.config.mapping.is_last_pp_rank():\n            all"
CP_GATHER = """        if self.config.mapping.cp_size > 1:
            hidden_states = cp_gather(hidden_states, whole_ids, self.config.mapping)
"""
NOT_UNDERSTOOD = {
    "no class": ("class DecoderModelForCausalLM(", "class DecoderForCausalLM(", "class DecoderModelForCausalLM"),
    "no forward": ("    def forward(self, input_ids", "    def run(self, input_ids", "method forward"),
    "two forwards": (
        "class EagleForCausalLM",
        "DecoderModelForCausalLM = None\nclass DecoderModelForCausalLM",
        "2 of them",
    ),
    "no gather": (
        ANCHOR,
        ANCHOR.replace("gather_last_token_logits", "gather_rows"),
        "call of gather_last_token_logits",
    ),
    "another target": (ANCHOR, "last_" + ANCHOR, "assignment hidden_states = "),
    "another argument": (
        ANCHOR,
        ANCHOR.replace("                hidden", "                all_hidden"),
        "assignment hidden_states",
    ),
    "two gathers": (
        CP_GATHER,
        CP_GATHER + "        x = gather_last_token_logits(hidden_states, None, True)\n",
        "2 of them",
    ),
    "gather in a loop": (ANCHOR, f"for _ in (0,): {ANCHOR}", "if around it"),
    "not the last rank": (LAST_RANK, LAST_RANK.replace("is_last", "is_first"), "is_last_pp_rank()"),
    "inverted branch": (LAST_RANK, LAST_RANK.replace("if self", "if not self"), "is_last_pp_rank()"),
    "no transformer": ("self.transformer.forward(**arguments)", "self.decode(**arguments)", "self.transformer.forward"),
    "no context-parallel gather": (CP_GATHER, "", "a context-parallel gather between"),
    "context-parallel gather after it": (
        "            lm_logits = ",
        "            if self.config.mapping.cp_size > 1:\n                pass\n            lm_logits = ",
        "nothing of the transformer or of context parallelism after it",
    ),
    "no all_hidden_states": (
        "            all_hidden_states = hidden_states\n",
        "",
        "all_hidden_states bound before it",
    ),
    "another head": (
        "self.lm_head(hidden_states)",
        "self.lm_head(all_hidden_states)",
        "self.lm_head(hidden_states) after it",
    ),
    "head before it": (
        "            all_hidden",
        "            self.lm_head(hidden_states)\n            all_hidden",
        "no call of self.lm_head",
    ),
    "statement beside it": (ANCHOR, "x = 1; " + ANCHOR, "on lines of its own"),
    "statement behind it": ("remove_input_padding())  #", "remove_input_padding()); x = 1  #", "on lines of its own"),
    "on the branch's line": (
        LAST_RANK + """_hidden_states = hidden_states
            hidden_states = gather_last_token_logits(
                hidden_states, last_token_ids,
                remove_input_padding())""",
        """        all_hidden_states = hidden_states
        if self.config.mapping.is_last_pp_rank(): hidden_states = gather_last_token_logits(hidden_states, last_token_ids, True)
        if self.config.mapping.is_last_pp_rank():""",
        "on lines of its own",
    ),
    "continued behind it": ("remove_input_padding())  # one row of each sequence", "remove_input_padding()); \\\n            x = 1", "on lines of its own"),
    "not Python": ("class EagleForCausalLM", "class class EagleForCausalLM", "Python source"),
}


@pytest.mark.parametrize("case", NOT_UNDERSTOOD)
def test_a_file_that_is_not_understood_is_refused_saying_what_was_looked_for(one_site, case):
    old, new, looked_for = NOT_UNDERSTOOD[case]
    path = definition_path(one_site.folder)
    source = path.read_text()
    assert old in source
    path.write_text(source.replace(old, new, 1))
    before = path.read_bytes()
    assert states_by_path(patch.status(one_site))["DecoderModelForCausalLM"] == "not_understood"
    with pytest.raises(PatchError) as error:
        patch.apply(one_site)
    assert looked_for in error.value.expected + error.value.found and str(path) in error.value.what
    assert path.read_bytes() == before and not list(path.parent.glob(".*"))


@pytest.mark.parametrize(
    "version, other", [("0.14.0", "0.15.0"), ("0.15.0", "0.16.0"), ("0.16.0", "0.15.0"), ("1.2.1", "0.13.0")]
)
def test_a_file_of_another_version_than_the_one_beside_it_is_refused(tmp_path, version, other):
    write_upstream(tmp_path, version)
    definition_path(tmp_path).write_bytes(definition_path(write_upstream(tmp_path / "other", other)).read_bytes())
    with pytest.raises(PatchError, match=f"as in {version}"):
        patch.apply(find_site(tmp_path))


@pytest.mark.parametrize(
    "old, new",
    [
        ("            hidden_states = gather", "            hidden_states.mark_output('full')\n            hidden_states = gather"),
        ("            lm_logits = ", "            hidden_states.mark_output(name='rows')\n            lm_logits = "),
        ("            lm_logits = ", "            hidden_states.mark_output(f'rows_{0}')\n            lm_logits = "),
        ("class EncoderModel", "NAME = 'final_post_all'\nclass EncoderModel"),
    ],
    ids=["marked before the gather", "marked after it", "marked by a made name", "our name"],
)  # fmt: skip
def test_someone_elses_patch_is_recognised_and_left_alone(one_site, old, new):
    path = definition_path(one_site.folder)
    path.write_text(path.read_text().replace(old, new, 1))
    before = path.read_bytes()
    for verb in (patch.apply, patch.revert):
        with pytest.raises(PatchError, match="patched by someone else"):
            verb(one_site)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "old, new",
    [
        ("class EncoderModel", "# a note\nclass EncoderModel"),
        ("self.config.dtype)\n            trtllm_extract_rows", "'float32')\n            trtllm_extract_rows"),
        ("            trtllm_extract_rows = hidden_states\n", ""),
        ("original sha256:", "original sha256:0"),
    ],
    ids=["elsewhere", "in a line of ours", "a line of ours lost", "in the hash"],
)
def test_a_file_that_was_changed_after_it_was_patched_is_left_alone(one_site, old, new):
    patch.apply(one_site)
    path = definition_path(one_site.folder)
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    before = path.read_bytes()
    for verb in (patch.apply, patch.revert):
        with pytest.raises(PatchError, match="changed after it was patched|patched by someone else"):
            verb(one_site)
    assert path.read_bytes() == before


def test_a_decilm_that_was_changed_after_it_was_patched_stops_the_revert_of_all(one_site):
    patch.apply(one_site)
    path = decilm_path(one_site.folder)
    path.write_bytes(path.read_bytes() + b"# a note\n")
    before = definition_path(one_site.folder).read_bytes(), path.read_bytes()
    with pytest.raises(PatchError, match="changed after it was patched"):
        patch.revert(one_site)
    assert (definition_path(one_site.folder).read_bytes(), path.read_bytes()) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda lines, at: [*lines[: at + 1], lines[at + 2], lines[at + 1], *lines[at + 3 :]],
        lambda lines, at: [*lines, b"# a note\n"],
        lambda lines, at: [*lines, b"x = 1\n"],
    ],
    ids=["our lines in another order", "another comment", "another statement"],
)
def test_an_insertion_is_proven_and_not_believed(one_site, change):
    source = definition_path(one_site.folder).read_bytes()
    lines = edit.patched(source, DECODER, one_site.version).splitlines(keepends=True)
    at = next(number for number, line in enumerate(lines) if b"original sha256" in line)
    anchor = find_anchor(ast.parse(source), DECODER, one_site.version)
    edit._prove(source, b"".join(lines), DECODER, anchor)
    with pytest.raises(PatchError, match="without changing something else"):
        edit._prove(source, b"".join(change(lines, at)), DECODER, anchor)


def test_a_decilm_that_is_not_understood_is_left_alone_and_said(one_site):
    path = decilm_path(one_site.folder)
    path.write_text(path.read_text().replace("is_last_pp_rank", "is_only_rank"))
    before = path.read_bytes()
    decoder, decilm = patch.apply(one_site)
    assert (decoder.state, decilm.state) == ("patched", "not_understood") and path.read_bytes() == before
    assert "is_last_pp_rank" in decilm.reason.expected


def test_a_version_without_a_decilm_or_without_a_decoder(one_site):
    decilm_path(one_site.folder).unlink()
    assert states_by_path(patch.apply(one_site)) == {
        "DecoderModelForCausalLM": "patched",
        "DeciLMForCausalLM": "absent",
    }
    definition_path(one_site.folder).unlink()
    with pytest.raises(PatchError, match="DecoderModelForCausalLM: no file of it is installed"):
        patch.apply(one_site)


def test_a_symbolic_link_is_refused(one_site, tmp_path):
    path = definition_path(one_site.folder)
    path.rename(tmp_path / "real.py")
    path.symlink_to(tmp_path / "real.py")
    with pytest.raises(PatchError, match="symbolic link"):
        patch.apply(one_site)


def test_a_full_disk_leaves_the_file_as_it_was(one_site, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = definition_path(one_site.folder)
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PatchError, match="it is as it was") as error:
        patch.apply(one_site)
    assert "No space left" in error.value.found
    assert (
        path.read_bytes() == before
        and os.listdir(path.parent).count(path.name) == 1
        and not list(path.parent.glob(".*"))
    )


def test_a_file_that_cannot_be_read_is_named(one_site):
    path = definition_path(one_site.folder)
    path.unlink(), path.mkdir()
    with pytest.raises(PatchError, match="cannot be read"):
        patch.apply(one_site)


# Finding it


def test_a_folder_without_upstream_is_a_clear_error(tmp_path):
    with pytest.raises(PatchError, match="not installed here") as error:
        find_site(tmp_path)
    assert str(tmp_path) in error.value.found and "--site" in error.value.fix
    if "tensorrt_llm" not in sys.modules:
        with pytest.raises(PatchError, match="not installed here"):
            find_site()


def test_an_installed_upstream_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_upstream(tmp_path, "1.2.1"))
    assert model_patches.find_site() == model_patches.Site(tmp_path, Version("1.2.1"))


def test_the_last_assignment_of_the_version_counts(tmp_path):
    path = write_upstream(tmp_path, "0.16.0") / "tensorrt_llm" / "version.py"
    path.write_text('__version__ = "unknown"\n' + path.read_text())
    assert find_site(tmp_path).version == Version("0.16.0")


@pytest.mark.parametrize("version", ["0.12.0", "1.3.0rc20", "1.4.0"])
def test_a_version_that_the_patch_does_not_serve_is_refused(tmp_path, version):
    with pytest.raises(PatchError, match="not a version that the patch serves") as error:
        find_site(write_upstream(tmp_path, version))
    assert error.value.found == version


@pytest.mark.parametrize("text", ["", "__version__ = read()", "__version__ = 'one'", "def", "__version__ = 1"])
def test_a_version_that_cannot_be_read_is_refused(tmp_path, text):
    (write_upstream(tmp_path, "0.16.0") / "tensorrt_llm" / "version.py").write_text(text)
    with pytest.raises(PatchError, match="version of TensorRT-LLM cannot be read"):
        find_site(tmp_path)
