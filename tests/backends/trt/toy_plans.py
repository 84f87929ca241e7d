"""Engine directories of backend trt around toy models: our plans, and upstream's with their exact nine or ten inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stand_in_trt import PlanFacts, plan_bytes
from toy_engines import ALL, LAST, LIMITS, NUM_LAYERS, VOCAB_SIZE, Toy, tensors, toy_contract, toy_model

from tensorrt_llm_ext.fingerprint import file_fingerprint
from tensorrt_llm_ext.recipes import write_contract
from tensorrt_llm_ext.recipes.contract import Contract, EngineFile, Profile, TensorSpec

INDEX = dict(last=lambda graph: "last_token_ids")  # an engine that reads the row that it is told, not the one before

PROFILES = (Profile(64, 32, 8), Profile(256, 32, 20), Profile(256, 19, 40))  # within LIMITS of the toys

NINE = (
    ("input_ids", "int32", ("T",)),
    ("position_ids", "int32", ("T",)),
    ("last_token_ids", "int32", ("B",)),
    ("context_lengths", "int32", ("B",)),
    ("host_context_lengths", "int32", ("B",)),
    ("host_request_types", "int32", ("B",)),
    ("host_max_attention_window_sizes", "int32", (NUM_LAYERS,)),
    ("host_sink_token_length", "int32", (1,)),
    ("host_runtime_perf_knobs", "int64", (16,)),
)
TEN = (*NINE, ("host_context_progress", "int64", (1,)))

UPSTREAM_TOY = dict(taps=(ALL, LAST))


def upstream_tensors(inputs=TEN) -> tuple[TensorSpec, ...]:
    return (
        *(TensorSpec(n, "input", dtype, s, "host" if n.startswith("host_") else "device") for n, dtype, s in inputs),
        TensorSpec("logits", "output", "float32", ("B", VOCAB_SIZE)),
        *(t for t in tensors(Toy(**UPSTREAM_TOY)) if t.role == "output"),
    )


def trt_contract(toy: Toy, described: tuple[TensorSpec, ...], files=(), **changes) -> Contract:
    options = dict(
        backend="trt",
        builder="tensorrt_rtx",
        accepted_runtime="tensorrt_rtx==1.7.1.116",
        compute_capabilities=("12.0",),
        tensors=described,
        profiles=PROFILES,
    )
    return replace(toy_contract(toy, tuple(files)), **{**options, **changes})


def facts_of(described, profiles=PROFILES, **changes) -> PlanFacts:
    bounds = [
        {"T": (1, p.max_num_tokens, p.max_num_tokens), "B": (1, 1, p.max_batch_size), "S": (1, 1, p.max_seq_len)}
        for p in profiles
    ]
    named = {t.name: (t.role, t.dtype, list(t.shape)) for t in described}
    return replace(PlanFacts("1.7.1.116", "12.0", named, bounds), **changes)


def write_plan(
    folder: Path, contract: Contract, facts: PlanFacts, graph: bytes, *, name="engine.plan", magic=b"vtrt"
) -> Path:
    """Write an engine directory: a plan of the stand-in's, and ``contract`` with that plan as its file."""
    folder.mkdir(parents=True)
    (folder / name).write_bytes(plan_bytes(facts, graph, magic))
    file = EngineFile(name, (folder / name).stat().st_size, file_fingerprint(folder / name))
    write_contract(folder, replace(contract, files=(file,)))
    return folder


def write_ours(folder: Path, toy: Toy | None = None, *, facts: dict | None = None, **changes) -> Path:
    """One of our plans; ``facts`` changes what the plan says of itself, ``changes`` what the contract says."""
    toy = toy or Toy()
    described = tensors(toy)
    made = facts_of(described, **(facts or {}))
    return write_plan(folder, trt_contract(toy, described, **changes), made, toy_model(toy).SerializeToString())


def write_upstream(folder: Path, inputs=TEN, *, toy: dict | None = None, facts: dict | None = None, **changes) -> Path:
    """One of upstream's plans: one profile, which its contract does not describe."""
    toy = Toy(**{**UPSTREAM_TOY, **(toy or {})})
    described = upstream_tensors(inputs)
    whole = Profile(LIMITS.max_num_tokens, LIMITS.max_batch_size, LIMITS.max_seq_len)
    made = facts_of(described, (whole,), version="10.7.0", is_upstream=True, **(facts or {}))
    options = {"accepted_runtime": "tensorrt_llm==0.16.0", "builder": "tensorrt_llm", "profiles": (), **changes}
    contract = trt_contract(toy, described, **options)
    return write_plan(folder, contract, made, toy_model(toy).SerializeToString(), name="rank0.engine", magic=b"ftrt")
