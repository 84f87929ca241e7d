"""What the patch refuses: definitions it does not understand, files that someone else changed, disks that are full."""

import ast
import errno
import os

import pytest
from upstream_source import decilm_path, definition_path, write_upstream

from model_patches import edit, find_site, patch
from model_patches.anchor import DECODER, find_anchor
from tensorrt_llm_ext.errors import PatchError

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


def states_by_path(statuses):
    return {status.target.class_name: status.state for status in statuses}


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
