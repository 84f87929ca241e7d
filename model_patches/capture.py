"""Capture: the patch's twin for upstream's PyTorch backend, put around a running model; no file is changed.

``DecoderModelForCausalLM.forward`` calls ``self.model(…)``, which returns the post-norm state of every row of the batch,
``[tokens, hidden]``, context requests first; then the logits processor picks rows. Capture sits between the two:

1. before the forward it reads who lies where (``attn_metadata.request_ids``, ``seq_lens``) and registers the plan;
2. when ``self.model`` has returned, it reads them again and consumes the plan: upstream keeps one metadata object and
   writes the next step into it, and rows sliced by another step's layout would be other requests' rows;
3. it slices each expected request's rows, copies them to the host, and makes records of them.

A request is recognised by the tokens that ran, never by its place: the hash of its slice of ``input_ids`` must be that of
a work item that was announced by ``expect``.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from model_patches.steps import Step, check_step, step_of, token_ids_of
from tensorrt_llm_ext.errors import PatchError, PlanError
from tensorrt_llm_ext.fingerprint import token_hash
from tensorrt_llm_ext.recipes.contract import Contract
from tensorrt_llm_ext.results.record import Failure, Origin, Record, WorkItem
from tensorrt_llm_ext.runtime.plan import Plan, PlanRegistry, layout_digest
from tensorrt_llm_ext.runtime.unpacking import record


@dataclass
class _Flight:
    """A forward that is running: its plan, and the expected requests among its contexts by their place."""

    metadata: Any
    step: Step
    plan: Plan
    token_ids: np.ndarray  # int32 [tokens], of the whole batch
    items: dict[int, WorkItem]
    answers: list[Record | Failure] | None = None  # set when the model's output was captured


def capture(model: Any, contract: Contract, origin: Origin) -> Capture:
    """Capture the hidden states of a ``DecoderModelForCausalLM`` of upstream's PyTorch backend, until ``close``.

    ``contract`` and ``origin`` go into the records (``captured_contract``, ``captured_origin``). Raises PatchError when
    the model is not built as capture knows it, or its forward is replaced already.
    """
    inner = getattr(model, "model", None)
    for module in (model, inner):
        forward = getattr(module, "__dict__", {}).get("forward") or getattr(module, "_compiled_call_impl", None)
        if forward is not None:
            raise PatchError(
                f"the forward of this {type(module).__name__} is replaced already",
                expected="forward as its class defines it, not compiled",
                found=repr(forward),
                fix="close the other capture first; torch.compile and piecewise CUDA graphs must be off",
            )
    names = set(inspect.signature(model.forward).parameters) if hasattr(model, "forward") else set()
    missing = sorted({"attn_metadata", "input_ids"} - names)
    if missing or not hasattr(inner, "forward"):
        raise PatchError(
            f"a {type(model).__name__} cannot be captured: it is not built as upstream's decoders are",
            expected="forward(attn_metadata, input_ids, …) that calls self.model(…)",
            found=f"no parameter {', '.join(missing)}" if missing else "no self.model with a forward",
            fix="pass the model object itself, a DecoderModelForCausalLM of the PyTorch backend",
        )
    return Capture(model, contract, origin)


class Capture:
    """A model under capture. Announce work items, run them through upstream, take their records. Thread-safe."""

    def __init__(self, model: Any, contract: Contract, origin: Origin) -> None:
        self.contract = contract
        self.origin = origin
        self._outer, self._inner = model.forward, model.model.forward
        self._signature = inspect.signature(self._outer)
        self._plans = PlanRegistry()
        self._lock = threading.Lock()
        self._running = threading.local()  # the flight of this thread's forward
        self._expected: dict[str, deque[WorkItem]] = defaultdict(deque)  # by token hash
        self._request_ids: set[str] = set()
        self._waiting: dict[str, None] = {}  # request ids without an answer, in order; those of a running forward too
        self._answers: list[Record | Failure] = []
        self._num_unexpected = 0
        self._replaced = (
            (model, _like(self._outer, self._forward)),
            (model.model, _like(self._inner, self._forward_inner)),
        )
        for module, forward in self._replaced:
            module.forward = forward

    def expect(self, items: Iterable[WorkItem]) -> None:
        """Announce work items before their token ids are given to upstream. Raises PlanError for an id seen before."""
        for item in items:
            with self._lock:
                if item.request_id in self._request_ids:
                    raise PlanError(
                        f"request '{item.request_id}' was announced before",
                        expected="each request id once",
                        found=item.request_id,
                        fix="give every request its own id",
                    )
                self._request_ids.add(item.request_id)
                self._waiting[item.request_id] = None
                self._expected[item.token_hash].append(item)

    def take(self) -> list[Record | Failure]:
        """Return the answers that came in since the last call."""
        with self._lock:
            answers, self._answers = self._answers, []
            return answers

    def finish(self) -> list[Record | Failure]:
        """Return the last answers; raise PlanError, keeping them for ``take``, while an announced item has none."""
        with self._lock:
            waiting, num_announced = list(self._waiting), len(self._request_ids)
        if waiting:
            raise PlanError(
                f"{len(waiting)} announced requests did not come back, the first '{waiting[0]}'",
                expected=f"{num_announced} requests captured, each with the token ids of its work item",
                found=f"{num_announced - len(waiting)} captured; {self._num_unexpected} ran with token ids nobody announced",
                fix="give upstream the work items' token ids (prompt_token_ids), and wait until they have run",
            )
        return self.take()

    def stats(self) -> dict[str, int]:
        """The plans' counts, and requests: answered, waiting, and unexpected (ran, but were not announced)."""
        with self._lock:
            waiting = len(self._waiting)
            answered = len(self._request_ids) - waiting
            requests = {"answered": answered, "waiting": waiting, "unexpected": self._num_unexpected}
        return {**self._plans.stats(), **requests}

    def close(self) -> None:
        """Give the model its own forward back. Idempotent."""
        for module, forward in self._replaced:
            if vars(module).get("forward") is forward:
                del module.forward

    def __enter__(self) -> Capture:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._signature.bind(*args, **kwargs).arguments
        flight = self._begin(arguments)
        if flight is None:
            return self._outer(*args, **kwargs)
        self._running.flight = flight
        try:
            result = self._outer(*args, **kwargs)
            self._publish(flight)
            return result
        except BaseException:
            self._plans.abandon(flight.plan)
            self._put_back(flight)
            raise
        finally:
            self._running.flight = None

    def _forward_inner(self, *args: Any, **kwargs: Any) -> Any:
        output = self._inner(*args, **kwargs)
        flight = getattr(self._running, "flight", None)
        if flight is not None:
            self._verify(flight, output)
            flight.answers = self._answers_of(flight, output)
        return output

    def _begin(self, arguments: dict[str, Any]) -> _Flight | None:
        """Register the plan of a forward; None when no context of it was announced."""
        metadata = arguments["attn_metadata"]
        if not metadata.num_contexts or not self.stats()["waiting"]:
            return None
        step = step_of(metadata)
        token_ids = token_ids_of(arguments, step)
        check_step(arguments, step)
        items = self._recognised(step, token_ids)
        if not items:
            return None
        return _Flight(metadata, step, self._plans.make(step.request_ids, step.row_counts), token_ids, items)

    def _recognised(self, step: Step, token_ids: np.ndarray) -> dict[int, WorkItem]:
        hashes = [token_hash(token_ids[step.rows(index)]) for index in range(step.num_contexts)]
        with self._lock:
            found = {index: self._expected[h].popleft() for index, h in enumerate(hashes) if self._expected.get(h)}
            self._num_unexpected += len(hashes) - len(found)
            return found

    def _verify(self, flight: _Flight, output: Any) -> None:
        """Consume the plan against what came back. Raises PlanError."""
        if not hasattr(output, "shape"):
            raise self._unpromised(flight, f"a {type(output).__name__}")
        now = step_of(flight.metadata)
        digest = layout_digest(now.request_ids, now.row_counts)
        self._plans.consume(flight.plan, total_rows=output.shape[0], digest=digest)
        found = f"{list(output.shape)} {str(output.dtype).removeprefix('torch.')}"
        if found != self._promised(flight):
            raise self._unpromised(flight, found)

    def _promised(self, flight: _Flight) -> str:
        dtype = self.contract.output_of(self.contract.taps[0]).dtype
        return f"{[flight.plan.total_rows, self.contract.architecture.hidden_size]} {dtype}"

    def _unpromised(self, flight: _Flight, found: str) -> PlanError:
        return PlanError(
            "the model's output is not the states that the contract promises",
            expected=self._promised(flight),
            found=found,
            fix="capture a decoder that returns its states alone, with a contract of its own from captured_contract",
        )

    def _answers_of(self, flight: _Flight, output: Any) -> list[Record | Failure]:
        has_all = any(tap.rows == "all" for tap in self.contract.taps)
        spans = [flight.step.rows(index) for index in flight.items]
        wanted = [np.arange(span.start if has_all else span.stop - 1, span.stop) for span in spans]
        rows = _on_host(output[np.concatenate(wanted)])  # one copy for all requests
        parts = np.split(rows, np.cumsum([len(own) for own in wanted])[:-1])
        answers = []
        for item, span, own in zip(flight.items.values(), spans, parts, strict=True):
            states = [own if tap.rows == "all" else own[-1:] for tap in self.contract.taps]
            answers.append(record(item, flight.token_ids[span], states, self.contract, self.origin))
        return answers

    def _publish(self, flight: _Flight) -> None:
        if flight.answers is None:
            raise PlanError(
                "a forward ended without its states passing through self.model",
                expected="one call of self.model in each forward",
                found="none",
                fix="run prefill eagerly: torch.compile and piecewise CUDA graphs must be off",
            )
        with self._lock:
            self._answers += flight.answers
            for answer in flight.answers:
                del self._waiting[answer.request_id]

    def _put_back(self, flight: _Flight) -> None:
        with self._lock:
            for item in reversed(flight.items.values()):
                self._expected[item.token_hash].appendleft(item)


def _like(original: Callable, ours: Callable) -> Callable:
    """A function that calls ``ours`` and has the name and signature of ``original``, which upstream may look at."""
    return functools.wraps(original)(lambda *args, **kwargs: ours(*args, **kwargs))


def _on_host(rows: Any) -> np.ndarray:
    """Copy torch rows to NumPy, bit for bit."""
    import torch

    rows = rows.detach().to("cpu")
    if rows.dtype is torch.bfloat16:  # NumPy has no such type of its own
        return rows.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return rows.numpy()
