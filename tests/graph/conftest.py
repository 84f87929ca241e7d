"""What the graph's tests share: a plain packer, a plain runner, and transformers as the reference."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from tensorrt_llm_ext.checkpoint.protocol import TensorInfo


def pack(sequences: list[np.ndarray], extra_padding: int = 0) -> dict[str, np.ndarray]:
    """Every index array of a batch, written slot by slot for the reader, not for speed."""
    lengths = [len(sequence) for sequence in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    longest = max(lengths) + extra_padding
    arrays = {
        "input_ids": np.concatenate(sequences),
        "position_ids": np.concatenate([np.arange(n) for n in lengths]),
        "attention_rows": [[start + min(s, n - 1) for s in range(longest)] for start, n in zip(starts, lengths)],
        "packed_slots": [b * longest + p for b, n in enumerate(lengths) for p in range(n)],
        "last_token_ids": np.cumsum(lengths),
        "sequence_lengths": lengths,
    }
    return {name: np.asarray(array, dtype=np.int32) for name, array in arrays.items()}


class OrtDecoder:
    """A written decoder, opened in ONNX Runtime."""

    def __init__(self, model: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # tiny models
        self.session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    def arrays(self, sequences: list[np.ndarray], extra_padding: int = 0) -> dict[str, np.ndarray]:
        """The inputs this decoder has, for one batch."""
        arrays = pack(sequences, extra_padding)
        return {tensor.name: arrays[tensor.name] for tensor in self.session.get_inputs()}

    def run(self, sequences: list[np.ndarray], extra_padding: int = 0) -> dict[str, np.ndarray]:
        names = [tensor.name for tensor in self.session.get_outputs()]
        return dict(zip(names, self.session.run(names, self.arrays(sequences, extra_padding)), strict=True))


@pytest.fixture(scope="session")
def open_decoder():
    return OrtDecoder


@pytest.fixture(scope="session")
def reference_states():
    """Every state of one sequence, by (layer, norm), float32 ``[tokens, hidden]``, from transformers."""

    def states(model, token_ids: np.ndarray) -> dict[tuple[int, str], np.ndarray]:
        kept = {}
        hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept.update(last=args[0]))
        with torch.no_grad():
            output = model.model(torch.from_numpy(token_ids.astype(np.int64))[None], output_hidden_states=True)
        hook.remove()
        *below, post = output.hidden_states
        named = {(layer, "pre"): state for layer, state in enumerate(below)}
        named |= {(len(below), "pre"): kept["last"], (len(below), "post"): post}
        return {place: state[0].float().numpy() for place, state in named.items()}

    return states


class ArrayCheckpoint:
    """A checkpoint of arrays in memory, none of which lies in a file: what a GGUF file is to the graph."""

    def __init__(self, model, architecture) -> None:
        self.path, self.name, self.architecture = Path("memory"), "in-memory", architecture
        self.arrays = {name: value.numpy() for name, value in model.state_dict().items()}

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(name, self.arrays[name].dtype.name, self.arrays[name].shape)

    def tensor(self, name: str) -> np.ndarray:
        return self.arrays[name]


@pytest.fixture(scope="session")
def array_checkpoint():
    return ArrayCheckpoint
