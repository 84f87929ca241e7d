"""audit names the fault of each dump that was made wrong on purpose, and passes those that are right, whoever wrote them."""

import gzip
import json
import shutil

import numpy as np
import pytest
import tiny
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from tensorrt_llm_ext.builder import build_engine, layer_states
from tensorrt_llm_ext.checkpoint import open_checkpoint
from tensorrt_llm_ext.checks.audit import arrow_reference, audit
from tensorrt_llm_ext.checks.dumps import open_dump
from tensorrt_llm_ext.cli import main
from tensorrt_llm_ext.errors import ForeignDataset, InputError, TapError

NUM_SEQUENCES, PAD = 12, 2
RNG = np.random.default_rng(4)
# two of each length, so that rows can be swapped; the first token is the BOS, as the tokenizer writes it
PROMPTS = [[0, *RNG.integers(3, 250, size=6 + number // 2).tolist()] for number in range(NUM_SEQUENCES)]


def extracted(folder, checkpoint, taps):
    build_engine(checkpoint, folder / "engine", taps=taps, max_seq_len=32)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in PROMPTS))
    words = ["run", folder / "engine", "--input", folder / "prompts.jsonl", "--out", folder / "out", "--ids-field", "ids"]
    result = CliRunner().invoke(main, [str(word) for word in [*words, "--shard-mib", "1", "--threads", "1"]])
    assert result.exit_code == 0, result.output
    return folder / "out"


def written(dataset, out, format, *words):
    result = CliRunner().invoke(main, ["export", str(dataset), "--to", format, "--out", str(out), *map(str, words)])
    assert result.exit_code == 0, result.output
    return out


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory):
    return tiny.tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny", "llama")


@pytest.fixture(scope="module")
def checkpoint(checkpoint_path):
    with open_checkpoint(checkpoint_path) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def dataset(checkpoint_path, tmp_path_factory):
    return extracted(tmp_path_factory.mktemp("eagle3"), checkpoint_path, "eagle3")


@pytest.fixture(scope="module")
def originals(dataset, checkpoint_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("originals")
    return {
        "speculators": written(dataset, folder / "speculators", "speculators-v2"),
        "specforge": written(dataset, folder / "specforge", "specforge", "--checkpoint", checkpoint_path),
        "modelopt": written(dataset, folder / "modelopt", "modelopt"),
        "modelopt after the norm": written(dataset, folder / "post", "modelopt", "--checkpoint", checkpoint_path),
    }


def codes_of(path, checkpoint, **options):
    dump = open_dump(path)
    reference = arrow_reference(dump.arrow) if dump.arrow else None
    return audit(dump, checkpoint, **{"reference": reference, **options})


def sample_path(out, number):
    return out / "hidden_states" / f"hs_{number}.safetensors"


def changed(out, change, numbers=range(NUM_SEQUENCES)):
    """Change the tensors of speculators' files."""
    for number in numbers:
        tensors = load_file(sample_path(out, number))
        save_file({name: tensor.contiguous() for name, tensor in change(dict(tensors)).items()}, sample_path(out, number))


@pytest.mark.parametrize("name", ["speculators", "specforge", "modelopt", "modelopt after the norm"])
def test_what_we_export_is_what_its_format_promises(originals, checkpoint, name):
    found = codes_of(originals[name], checkpoint)
    assert found.faults == [] and found.notes == [] and len(found.slots) == 4
    assert all(slot.found == slot.promised and slot.distance < 1e-3 for slot in found.slots)
    assert [slot.found for slot in found.slots[:3]] == [f"the state after {layer} layers" for layer in (2, 4, 5)]
    assert ("before" if name in ("speculators", "modelopt") else "after") in found.slots[3].found


def test_our_own_states_are_what_their_header_promises(dataset, checkpoint):
    found = codes_of(dataset, checkpoint)
    assert found.format == "tensorrt_llm_ext states" and found.faults == [] and len(found.slots) == 4


def as_trtllm(originals, out):
    """TensorRT-LLM's form: lists of requests, and the last file not named by the number of files."""
    out.mkdir()
    requests = []
    for number in range(NUM_SEQUENCES):
        data = torch.load(originals["modelopt after the norm"] / f"{number}.pt", weights_only=True)
        request = {"id": number, "input_ids": data["input_ids"], "hidden_state": data["hidden_states"]}
        requests.append({**request, "aux_hidden_states": data["aux_hidden_states"]})
    for end in (5, 10, 12):
        torch.save(requests[end - (5 if end < 12 else 2) : end], out / f"data_{end}.pt")
    return out


def test_trtllm_s_lists_and_vllm_s_files_and_speculators_v1_and_compressed_ones(originals, checkpoint, tmp_path):
    assert codes_of(as_trtllm(originals, tmp_path / "trtllm"), checkpoint).faults == []
    (tmp_path / "vllm").mkdir()
    for number in range(NUM_SEQUENCES):
        shutil.copy(sample_path(originals["speculators"], number), tmp_path / "vllm" / f"cmpl-{number}-0.safetensors")
    found = codes_of(tmp_path / "vllm", checkpoint)
    assert found.format == "vllm" and found.faults == []
    (tmp_path / "v1").mkdir()
    (tmp_path / "gz").mkdir()
    for number in range(NUM_SEQUENCES):
        tensors = load_file(sample_path(originals["speculators"], number))
        states = list(tensors["hidden_states"].unbind(1))
        mask = torch.ones_like(tensors["token_ids"])
        torch.save({"input_ids": tensors["token_ids"], "hidden_states": states, "loss_mask": mask}, tmp_path / "v1" / f"data_{number}.pt")
        plain = originals["specforge"] / "rows_0-2000" / f"data_{number}.ckpt"
        (tmp_path / "gz" / f"data_{number}.ckpt.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert codes_of(tmp_path / "v1", checkpoint).faults == []
    found = codes_of(tmp_path / "gz", checkpoint)
    assert found.format == "specforge" and found.faults == []


# Dumps that are wrong on purpose: each makes one of ``out``, a copy of speculators' form, and says which codes are right.


def l2_normalised(out, **_):
    changed(out, lambda t: t | {"hidden_states": torch.nn.functional.normalize(t["hidden_states"], dim=-1)})


def rows_of_another_request(out, **_):
    one, other = sample_path(out, 4), sample_path(out, 5)
    first, second = load_file(one), load_file(other)
    save_file({**first, "hidden_states": second["hidden_states"]}, one)
    save_file({**second, "hidden_states": first["hidden_states"]}, other)


def truncated_rows(out, **_):
    changed(out, lambda t: t | {"hidden_states": t["hidden_states"][:-2]}, [3])


def truncated_file(out, **_):
    sample_path(out, 3).write_bytes(sample_path(out, 3).read_bytes()[:-100])


def lost_tail(out, **_):
    for number in (10, 11):
        sample_path(out, number).unlink()


def lost_in_the_middle(out, **_):
    sample_path(out, 4).unlink()


def textual_order(out, **_):
    names = sorted(range(NUM_SEQUENCES), key=str)  # 0, 1, 10, 11, 2 …
    contents = [sample_path(out, number).read_bytes() for number in names]
    for number, content in enumerate(contents):
        sample_path(out, number).write_bytes(content)


def swapped_files(out, **_):
    contents = [sample_path(out, number).read_bytes() for number in (4, 5)]
    for number, content in zip((5, 4), contents, strict=True):
        sample_path(out, number).write_bytes(content)


def missing_bos(out, checkpoint, **_):
    rows = recomputed(checkpoint, [ids[1:] for ids in PROMPTS])
    for number, ids in enumerate(PROMPTS):
        save_file({"token_ids": torch.tensor(ids[1:]), "hidden_states": rows[number]}, sample_path(out, number))


def rows_computed_without_bos(out, checkpoint, **_):
    rows = recomputed(checkpoint, [ids[1:] for ids in PROMPTS])
    for number, ids in enumerate(PROMPTS):
        states = torch.cat([rows[number][:1], rows[number]])  # as many rows as tokens
        save_file({"token_ids": torch.tensor(ids), "hidden_states": states}, sample_path(out, number))


def last_index_on_padding(out, checkpoint, **_):
    padded = [ids + [PAD] * 4 for ids in PROMPTS]
    rows = recomputed(checkpoint, padded)
    for number, ids in enumerate(padded):
        save_file({"token_ids": torch.tensor(ids), "hidden_states": rows[number][-1:].contiguous()}, sample_path(out, number))


def previous_row(out, checkpoint, **_):
    changed(out, lambda t: t | {"hidden_states": t["hidden_states"][-2:-1]})


def padded(out, checkpoint, **_):
    tokens = [ids + [PAD] * 4 for ids in PROMPTS]
    rows = recomputed(checkpoint, tokens)
    for number, ids in enumerate(tokens):
        save_file({"token_ids": torch.tensor(ids), "hidden_states": rows[number]}, sample_path(out, number))


def not_finite(out, **_):
    def change(tensors):
        tensors["hidden_states"][1, 2, 3] = float("nan")
        return tensors

    changed(out, change, [0])


def noise(out, **_):
    changed(out, lambda t: t | {"hidden_states": torch.randn(t["hidden_states"].shape)}, [11])


def other_hidden_size(out, **_):
    changed(out, lambda t: t | {"hidden_states": t["hidden_states"][..., :-1]}, [0])


def tokens_outside(out, **_):
    changed(out, lambda t: t | {"token_ids": t["token_ids"] + 1000}, [0])


def layer_off_by_one(out, checkpoint, **_):
    shift(out, checkpoint, [3, 5, 6])


def other_layers(out, checkpoint, **_):
    shift(out, checkpoint, [2, 7, 5])


def after_the_norm(out, checkpoint, **_):
    rows = recomputed(checkpoint, PROMPTS, last=(8, "post"))
    for number, ids in enumerate(PROMPTS):
        save_file({"token_ids": torch.tensor(ids), "hidden_states": rows[number]}, sample_path(out, number))


def shift(out, checkpoint, layers):
    rows = recomputed(checkpoint, PROMPTS, layers=layers)
    for number, ids in enumerate(PROMPTS):
        save_file({"token_ids": torch.tensor(ids), "hidden_states": rows[number]}, sample_path(out, number))


def recomputed(checkpoint, sequences, layers=(2, 4, 5), last=(8, "pre")):
    """The states of these layers and the last one, for each sequence ``[tokens, 4, hidden]``."""
    places = [*((layer, "pre") for layer in layers), last]
    sequences = [np.array(ids, dtype=np.int32) for ids in sequences]
    found = {(layer, norm): states for layer, norm, states in layer_states(checkpoint, sequences)}
    return [
        torch.from_numpy(np.stack([found[place][number] for place in places], axis=1)) for number in range(len(sequences))
    ]


WRONG = {
    after_the_norm: {"wrong_norm"},
    layer_off_by_one: {"layer_off_by_one"},
    other_layers: {"wrong_layer"},
    rows_of_another_request: {"other_request"},
    last_index_on_padding: {"padded", "last_on_padding"},
    previous_row: {"wrong_row"},
    missing_bos: {"missing_bos"},
    rows_computed_without_bos: {"missing_bos"},
    l2_normalised: {"l2_normalised"},
    truncated_rows: {"truncated"},
    truncated_file: {"unreadable", "missing"},
    lost_tail: {"lost_tail"},
    lost_in_the_middle: {"missing"},
    textual_order: {"textual_order"},
    swapped_files: {"other_request"},
    padded: {"padded"},
    not_finite: {"not_finite"},
    noise: {"unknown_rows"},
    other_hidden_size: {"wrong_shape"},
    tokens_outside: {"other_tokens", "bad_tokens"},
}


@pytest.mark.parametrize("make", WRONG)
def test_the_fault_of_a_wrong_dump_is_named(originals, checkpoint, tmp_path, make):
    shutil.copytree(originals["speculators"], tmp_path / "out")
    make(tmp_path / "out", checkpoint=checkpoint)
    faults = codes_of(tmp_path / "out", checkpoint).faults
    assert {fault.code for fault in faults} == WRONG[make], faults


@pytest.mark.parametrize("make, codes", [(missing_bos, {"missing_bos"}), (rows_computed_without_bos, {"missing_bos"}),
                                         (last_index_on_padding, {"padded", "last_on_padding"})])  # fmt: skip
def test_without_the_input_too(originals, checkpoint, tmp_path, make, codes):
    shutil.copytree(originals["speculators"], tmp_path / "out")
    make(tmp_path / "out", checkpoint=checkpoint)
    found = codes_of(tmp_path / "out", checkpoint, reference=None)
    assert {fault.code for fault in found.faults} == codes - {"padded"} or {fault.code for fault in found.faults} == codes


def test_pre_norm_states_that_are_said_to_be_after_the_norm(originals, checkpoint, tmp_path):
    shutil.copytree(originals["modelopt"], tmp_path / "out")
    for path in (tmp_path / "out").glob("*.pt"):
        data = torch.load(path, weights_only=True)
        del data["hidden_states_prenorm"]  # as ModelOpt's dump by vLLM: the trainer then takes them to be after the norm
        torch.save(data, path)
    (fault,) = codes_of(tmp_path / "out", checkpoint).faults
    assert fault.code == "wrong_norm" and "after" in fault.expected and "before" in fault.found


def test_specforge_s_padding_is_a_note_and_states_of_another_norm_a_fault(originals, checkpoint, tmp_path):
    shutil.copytree(originals["specforge"], tmp_path / "out")
    path = tmp_path / "out" / "rows_0-2000" / "data_0.ckpt"
    data = torch.load(path, weights_only=True)
    for name, axis in (("input_ids", 0), ("loss_mask", 0), ("hidden_state", 1), ("aux_hidden_state", 1)):
        shape = [*data[name].shape]
        shape[axis] = 5
        data[name] = torch.cat([data[name], torch.zeros(shape, dtype=data[name].dtype)], dim=axis)
    torch.save(data, path)
    found = codes_of(tmp_path / "out", checkpoint)
    assert found.faults == [] and len(found.notes) == 1 and "is padded" in found.notes[0]


def test_the_same_sequence_twice_is_found(originals, checkpoint, tmp_path):
    shutil.copytree(originals["modelopt"], tmp_path / "out")
    shutil.copy(tmp_path / "out" / "3.pt", tmp_path / "out" / "again.pt")
    assert {fault.code for fault in codes_of(tmp_path / "out", checkpoint).faults} == {"duplicated"}


def test_an_unflushed_tail_of_trtllm_is_missed_when_the_input_is_known(originals, checkpoint, tmp_path):
    out = as_trtllm(originals, tmp_path / "trtllm")
    (out / "data_12.pt").unlink()
    reference = {str(number): np.array(ids) for number, ids in enumerate(PROMPTS)}
    found = codes_of(out, checkpoint, reference=reference)
    assert [fault.code for fault in found.faults] == ["lost_tail"] and "'10', '11'" in found.faults[0].found


def test_a_pickle_that_would_run_code_is_not_run(originals, checkpoint, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    shutil.copytree(originals["modelopt"], tmp_path / "out")
    torch.save({"input_ids": Bomb()}, tmp_path / "out" / "5.pt")
    assert [fault.code for fault in codes_of(tmp_path / "out", checkpoint).faults] == ["unreadable"]
    assert not (tmp_path / "ran").exists()


def test_a_sample_is_spread_and_layers_can_be_named(originals, checkpoint):
    found = codes_of(originals["speculators"], checkpoint, num_sampled=3, layers="2,4,5")
    assert found.sampled == ["0", "6", "11"] and found.faults == []
    found = codes_of(originals["speculators"], checkpoint, num_sampled=3, layers="1,3,4")
    assert {fault.code for fault in found.faults} == {"layer_off_by_one"}
    with pytest.raises(TapError, match="another number of auxiliary slots"):
        codes_of(originals["speculators"], checkpoint, layers="2,4")


def test_what_is_no_dump_is_said(checkpoint, tmp_path):
    with pytest.raises(ForeignDataset, match="is not a dump"):
        open_dump(tmp_path)
    (tmp_path / "a.pt").write_text("text")
    with pytest.raises(ForeignDataset, match="none of the files"):
        open_dump(tmp_path)
    (tmp_path / "list").mkdir()
    torch.save([], tmp_path / "list" / "data_1.pt")
    with pytest.raises(InputError, match="holds no sequence"):
        audit(open_dump(tmp_path / "list"), checkpoint)


def test_the_verb_says_it_and_its_exit_code_is_the_answer(originals, checkpoint_path, dataset, tmp_path):
    words = ["audit", str(originals["modelopt"]), "--checkpoint", str(checkpoint_path)]
    prompts = ["--input", str(dataset.parent / "prompts.jsonl"), "--ids-field", "ids"]
    result = CliRunner().invoke(main, [*words, *prompts])
    assert result.exit_code == 0 and "is what its format promises" in result.stdout, result.output
    shutil.copytree(originals["modelopt"], tmp_path / "out")
    (tmp_path / "out" / "11.pt").unlink()
    result = CliRunner().invoke(main, ["audit", str(tmp_path / "out"), *words[2:], *prompts, "--json"])
    described = json.loads(result.stdout)
    assert result.exit_code == 1 and [fault["code"] for fault in described["faults"]] == ["lost_tail"]
