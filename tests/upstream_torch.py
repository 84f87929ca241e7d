"""Stand-ins for upstream's PyTorch backend: a decoder of the documented shape, its metadata, and an executor's steps.

Like upstream, the executor keeps one metadata object and writes each step into it, runs prompts and generations in one
step (prompts first), and calls ``model.forward``, not the module itself.
"""

from __future__ import annotations

import queue
import random
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from torch import nn

VOCAB, HIDDEN = 263, 48


@dataclass
class AttentionMetadata:
    """Who lies where in a step. ``prompt_lens`` of a generation is that of its prompt."""

    request_ids: list[int] = field(default_factory=list)
    seq_lens: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    num_contexts: int = 0
    prompt_lens: list[int] = field(default_factory=list)
    kv_cache_params: SimpleNamespace | None = None
    mapping: SimpleNamespace | None = None
    is_cuda_graph: bool = False


class Decoder(nn.Module):
    """Every row depends on its own sequence's rows up to it, and on nothing else; the norm is the last step."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
        self.norm = nn.RMSNorm(HIDDEN, dtype=dtype)

    def forward(self, attn_metadata, input_ids=None, position_ids=None, inputs_embeds=None):
        rows = self.embedding(input_ids)
        sequences = torch.split(rows, attn_metadata.seq_lens.tolist())
        return self.norm(torch.cat([torch.cumsum(sequence.float(), 0).to(rows.dtype) for sequence in sequences]))


class DecoderModelForCausalLM(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.model = Decoder(dtype)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False, dtype=dtype)

    def forward(
        self,
        attn_metadata,
        input_ids=None,
        position_ids=None,
        inputs_embeds=None,
        return_context_logits=False,
        spec_metadata=None,
        lora_params=None,
        **kwargs,
    ):
        output = self.model(attn_metadata=attn_metadata, input_ids=input_ids, position_ids=position_ids)
        last = torch.cumsum(attn_metadata.seq_lens, 0) - 1
        return self.lm_head(output[last])


def expected_rows(model: DecoderModelForCausalLM, token_ids) -> torch.Tensor:
    """The right states of one prompt, run alone."""
    tokens = torch.tensor(token_ids)
    metadata = AttentionMetadata(seq_lens=torch.tensor([len(tokens)]))
    return Decoder.forward(model.model, metadata, tokens).detach()


def write_step(metadata: AttentionMetadata, prompts: list[tuple[int, list[int]]], generations=()) -> torch.Tensor:
    """Write a step into a metadata object, as upstream does; return its input_ids."""
    metadata.request_ids = [request_id for request_id, _ in (*prompts, *generations)]
    metadata.num_contexts = len(prompts)
    metadata.prompt_lens = [len(tokens) for _, tokens in (*prompts, *generations)]
    metadata.seq_lens = torch.tensor(
        [*(len(tokens) for _, tokens in prompts), *(1 for _ in generations)], dtype=torch.int32
    )
    metadata.kv_cache_params = SimpleNamespace(
        num_cached_tokens_per_seq=[*(0 for _ in prompts), *(len(tokens) for _, tokens in generations)]
    )
    rows = [*(token for _, tokens in prompts for token in tokens), *(tokens[-1] for _, tokens in generations)]
    return torch.tensor(rows, dtype=torch.int32)


class Executor:
    """Runs requests in steps of random size on its own thread; each request generates a few tokens after its prompt."""

    def __init__(self, model, first_id=0, seed=0, num_generated=3):
        self._model, self._random, self._num_generated = model, random.Random(seed), num_generated
        self._waiting: queue.Queue = queue.Queue()
        self._ids = iter(range(first_id, first_id + 100_000))
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.errors: list[BaseException] = []
        self.num_steps = 0
        self._thread.start()

    def submit(self, token_ids: list[int]) -> None:
        self._waiting.put(list(token_ids))

    def stop(self) -> None:
        """Run what was submitted to its end."""
        self._waiting.put(None)
        self._thread.join(timeout=60)
        assert not self._thread.is_alive()
        if self.errors:
            raise self.errors[0]

    def _run(self):
        try:
            metadata, generating, is_open = AttentionMetadata(), {}, True
            while is_open or generating:
                prompts, is_open = self._prompts(is_open, wait=not generating)
                running = [(request_id, tokens) for request_id, (tokens, _) in generating.items()]
                if prompts or running:
                    self._model.forward(metadata, input_ids=write_step(metadata, prompts, running))
                    self.num_steps += 1
                generating = {i: (tokens, left - 1) for i, (tokens, left) in generating.items() if left > 1}
                generating |= {i: (tokens, self._num_generated) for i, tokens in prompts if self._num_generated}
        except BaseException as error:
            self.errors.append(error)

    def _prompts(self, is_open, wait):
        prompts = []
        for _ in range(self._random.randint(1, 5) if is_open else 0):
            try:
                tokens = self._waiting.get(block=wait and not prompts, timeout=30)
            except queue.Empty:
                break
            if tokens is None:
                return prompts, False
            prompts.append((next(self._ids), tokens))
        return prompts, is_open
