"""What captured records say of the model they came from: a contract and an origin, as an engine directory has them."""

from __future__ import annotations

from tensorrt_llm_ext.builder.upstream import upstream_taps
from tensorrt_llm_ext.checkpoint import Checkpoint
from tensorrt_llm_ext.fingerprint import fingerprint
from tensorrt_llm_ext.recipes.contract import Contract, Fingerprints, Limits, MemoryEstimate, TensorSpec
from tensorrt_llm_ext.results.record import Origin, Tokenisation, origin_from_contract
from tensorrt_llm_ext.taps import DEFAULT_TAPS

BACKEND = "tensorrt_llm.torch"


def captured_contract(
    checkpoint: Checkpoint,
    *,
    version: str,
    dtype: str,
    limits: Limits,
    precision: str | None = None,
    taps: str = DEFAULT_TAPS,
) -> Contract:
    """Describe a model that upstream's PyTorch backend runs from ``checkpoint``; stores and records need it.

    ``version`` is TensorRT-LLM's, ``dtype`` the type of the model's states, ``precision`` that of its matrices where it
    differs (``fp8``), ``limits`` those of upstream's executor. There is no engine directory, so it lists no files, inputs or
    canaries. Raises TapError for a tap that the model's output does not hold.
    """
    architecture = checkpoint.architecture
    chosen = upstream_taps(taps, architecture.num_layers)
    described = {"version": version, "dtype": dtype, "precision": precision or dtype}
    return Contract(
        model_name=checkpoint.name,
        architecture=architecture,
        fingerprints=Fingerprints(
            checkpoint=checkpoint.fingerprint(),
            tokenizer=checkpoint.tokenizer().fingerprint(),
            recipe=fingerprint([tap.to_dict() for tap in chosen]),
            plan=fingerprint(described),
        ),
        backend=BACKEND,
        builder="tensorrt_llm",
        builder_version=version,
        accepted_runtime=f"tensorrt_llm=={version}",
        platform="any",
        compute_capabilities=(),
        weight_dtype=precision or dtype,
        activation_dtype=precision or dtype,
        taps=chosen,
        tensors=tuple(
            TensorSpec(
                tap.column(architecture.num_layers),
                "output",
                dtype,
                ("T" if tap.rows == "all" else "B", architecture.hidden_size),
                tap=tap,
            )
            for tap in chosen
        ),
        limits=limits,
        memory=MemoryEstimate(device_bytes=0, host_bytes=0, formula="none: upstream's executor owns the memory"),
        files=(),
        canaries=(),
        build={},
    )


def captured_origin(contract: Contract, tokenisation: Tokenisation = Tokenisation()) -> Origin:
    """What all records of one capture share. No gather is measured: rows are sliced by the step's own lengths."""
    return origin_from_contract(contract, "none", tokenisation)
