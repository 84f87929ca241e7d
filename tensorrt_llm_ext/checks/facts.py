"""The facts of each kind of thing, in words: what ``show`` prints, and what ``build`` and ``probe`` begin with."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.filesize import decimal

from tensorrt_llm_ext.checkpoint import Architecture, Checkpoint, open_checkpoint
from tensorrt_llm_ext.checkpoint.layout import HEAD
from tensorrt_llm_ext.checkpoint.safetensors_file import stored_tensors
from tensorrt_llm_ext.errors import CheckpointError, EngineError, ForeignDataset
from tensorrt_llm_ext.recipes import Contract, Recipe, TensorSpec, load_card, load_recipe, read_contract
from tensorrt_llm_ext.recipes.contract import EngineFile, Profile
from tensorrt_llm_ext.recipes.settings import longest_exact
from tensorrt_llm_ext.results.payload import record_from_payload
from tensorrt_llm_ext.results.record import Origin
from tensorrt_llm_ext.runtime import check_files
from tensorrt_llm_ext.taps import Tap

Fact = str | int | list[str]

_UNFINISHED = "no: go on with run --resume"


@dataclass(frozen=True)
class Description:
    """What something is: its kind, one line about it, and facts by name. ``unknown`` is a kind too."""

    kind: str
    title: str
    facts: dict[str, Fact]


def of_engine(path: Path) -> Description:
    """Describe an engine directory, and whether its files are there in their sizes."""
    contract = read_contract(path)
    facts = _contract_facts(contract)
    try:
        check_files(path, contract)
        facts["files_here"] = "all there, in the sizes that were published"
    except EngineError as error:
        facts["files_here"] = f"{error.what}: expected {error.expected}, found {error.found}"
    return Description("engine", f"{contract.model_name} for backend {contract.backend}", facts)


def of_contract(path: Path) -> Description:
    """Describe a contract without its engine."""
    contract = read_contract(path)
    return Description("contract", f"{contract.model_name} for backend {contract.backend}", _contract_facts(contract))


def of_checkpoint(path: Path) -> Description:
    """Describe a checkpoint from its headers."""
    with open_checkpoint(path) as checkpoint:
        return Description("checkpoint", checkpoint.name, _checkpoint_facts(checkpoint))


def of_recipe(path: Path) -> Description:
    """Describe a recipe; what it leaves open is said to be open."""
    recipe = load_recipe(path.resolve())
    model = {name: value for name, value in dataclasses.asdict(recipe.model).items() if value is not None}
    chosen = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(Recipe) if f.name not in ("name", "model")}
    facts: dict[str, Fact] = {
        "fits": ", ".join(f"{name} {value}" for name, value in model.items()) or "any model that is served",
        **{name: "left to the card and the model" if value is None else value for name, value in chosen.items()},
    }
    return Description("recipe", recipe.name, facts)


def of_card(path: Path) -> Description:
    """Describe a card."""
    card = load_card(path.resolve())
    facts: dict[str, Fact] = {
        "backend": card.backend,
        "precisions": list(card.precisions),
        "fastest_batch": f"{card.opt_num_tokens} tokens, at most {card.max_batch_size} sequences",
        "host_platform": card.platform,
        "compute_capability": card.compute_capability or "none: a CPU",
        "memory": f"{card.memory_gb} GB" if card.memory_gb else "not stated",
        "longest_sequence": f"{card.default_seq_len} tokens, unless the recipe or you say otherwise"
        if card.default_seq_len
        else "left to the recipe",
    }
    return Description("card", f"{card.name}, {card.title}", facts)


def of_record(path: Path) -> Description:
    """Describe a record payload; the hash of every row is checked on the way."""
    record = record_from_payload(path.read_bytes())
    origin = record.origin
    facts: dict[str, Fact] = {
        "work_item": record.work_item_id,
        "tokens": f"{record.num_tokens}" + (f", cut from {record.truncated_from}" if record.truncated_from else ""),
        "token_hash": record.token_hash,
        "states": [
            f"{state.tap.spelling(origin.num_layers)}: {list(state.rows.shape)} {state.rows.dtype}, {state.payload_hash}"
            for state in record.states
        ],
        **_origin_facts(origin),
    }
    return Description("record", f"request '{record.request_id}'", facts)


def of_dataset(path: Path) -> Description:
    """Describe a dataset of vectors by its header; another Lance dataset is unknown."""
    from tensorrt_llm_ext.store import open_vectors
    from tensorrt_llm_ext.store.manifest import read_manifest

    try:
        vectors = open_vectors(path)
    except ForeignDataset as error:
        return Description("unknown", error.what, {"expected": error.expected, "found": error.found})
    origin = vectors.header.origin
    facts: dict[str, Fact] = {
        "rows": len(vectors),
        "vectors": [
            f"{column.tap.spelling(origin.num_layers)} in {name}: {column.stored_dtype} [{column.hidden_size}]"
            + (f", computed in {column.computed_dtype}" if column.computed_dtype != column.stored_dtype else "")
            for name, column in vectors.columns.items()
        ],
        "finished": _UNFINISHED if read_manifest(Path(vectors.dataset.uri)) is None else "yes",
        "size": decimal(sum(file.stat().st_size for file in Path(vectors.dataset.uri).rglob("*") if file.is_file())),
        **_origin_facts(origin),
    }
    return Description("dataset", f"{len(vectors)} requests to {origin.model_name}", facts)


def of_states(path: Path) -> Description:
    """Describe a dataset of states by its header and its index; shards are not read."""
    from tensorrt_llm_ext.store import read_states_header, states_folder
    from tensorrt_llm_ext.store.index import read_parts
    from tensorrt_llm_ext.store.manifest import read_manifest

    folder = states_folder(path)
    header, parts = read_states_header(folder), read_parts(folder)
    origin = header.origin
    num_sequences = sum(part.num_sequences for part in parts)
    part = header.job.get("sharding")
    facts: dict[str, Fact] = {
        "sequences": f"{num_sequences}, {sum(part.num_rows for part in parts)} tokens",
        "states": [
            f"{column.tap.spelling(origin.num_layers)} in {column.name}: {column.stored_dtype} [{column.hidden_size}]"
            for column in header.columns
        ],
        "loss_mask": f"{header.job['policy']['loss_mask']}",
        "shards": f"{len(parts)}, {decimal(sum(part.shard.num_bytes for part in parts))}",
        "finished": _UNFINISHED if read_manifest(folder) is None else "yes",
        "part_of_a_run": f"{part['index']}/{part['count']}" if part else "the whole",
        **_origin_facts(origin),
    }
    return Description("dataset", f"states of {num_sequences} requests to {origin.model_name}", facts)


def of_weights(path: Path) -> Description:
    """Describe a safetensors file that is neither a record nor a whole checkpoint."""
    tensors = stored_tensors(path)
    dtypes = Counter(tensor.dtype for tensor in tensors.values())
    facts: dict[str, Fact] = {
        "tensors": f"{len(tensors)}: " + ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common()),
        "size": decimal(sum(tensor.length for tensor in tensors.values())),
        "first_tensors": list(tensors)[:5],
        "hint": "a checkpoint is its folder, with config.json and the tokenizer",
    }
    return Description("weights", "a safetensors file, not a record of ours", facts)


def architecture_in_words(architecture: Architecture) -> str:
    """One line about a model: family, layers, sizes and what is special."""
    a = architecture
    special = [
        name
        for name, is_there in (
            ("QK-norm", a.has_qk_norm),
            ("biases on q, k and v", a.has_qkv_bias),
            ("biases in the MLP", a.has_mlp_bias),
            (f"sliding window of {a.sliding_window}", a.sliding_window is not None),
        )
        if is_there
    ]
    sizes = (
        f"{a.family}: {a.num_layers} layers, hidden size {a.hidden_size}, {a.num_heads} heads of {a.head_dim} "
        f"({a.num_kv_heads} for keys and values), MLP {a.intermediate_size}, vocabulary {a.vocab_size}"
    )
    return ", ".join([sizes, *special])


def _origin_facts(origin: Origin) -> dict[str, Fact]:
    template = f", chat template {origin.template_hash}" if origin.template_hash else ""
    prefix = f", prefix {origin.prefix!r}" if origin.prefix else ""
    return {
        "model": f"{origin.model_name}, {origin.num_layers} layers, hidden size {origin.hidden_size}",
        "token_ids": f"special tokens: {origin.special_tokens}{template}{prefix}",
        "engine": f"{origin.engine_fingerprint}, backend {origin.backend}, gather convention {origin.convention}",
        "checkpoint_fingerprint": origin.checkpoint_fingerprint,
        "tokenizer_fingerprint": origin.tokenizer_fingerprint,
        "written_by": f"tensorrt_llm_ext {origin.code_version}",
    }


def _checkpoint_facts(checkpoint: Checkpoint) -> dict[str, Fact]:
    architecture = checkpoint.architecture
    longest, bound = longest_exact(architecture)
    tensors = list(checkpoint.tensors())
    dtypes = Counter(info.dtype for info in tensors)
    num_parameters = sum(math.prod(info.shape) for info in tensors)
    head = "its own" if any(info.name == HEAD for info in tensors) else "none"
    return {
        "architecture": architecture_in_words(architecture),
        "rope": f"{architecture.rope.type}, theta {architecture.rope.theta:g}",
        "longest_sequence": f"{longest} tokens: {bound}",
        "output_head": "tied to the embedding" if architecture.is_tied else head,
        "weights": f"{num_parameters / 1e6:,.1f} million parameters in {len(tensors)} tensors, read as "
        + ", ".join(f"{dtype} ({count})" for dtype, count in dtypes.most_common()),
        "tokenizer": _tokenizer_in_words(checkpoint),
        "taps": f"layer:0 to layer:{architecture.num_layers - 1}, final:pre, final; each @last, @mean or @all",
    }


def _tokenizer_in_words(checkpoint: Checkpoint) -> str:
    try:
        tokenizer = checkpoint.tokenizer()
    except CheckpointError as error:
        return f"not usable: {error.what}"
    return f"{tokenizer.num_tokens} tokens, {'with' if tokenizer.has_chat_template else 'without'} a chat template"


def _contract_facts(contract: Contract) -> dict[str, Fact]:
    num_layers = contract.architecture.num_layers
    limits, prints = contract.limits, contract.fingerprints
    cards = f"compute capability {', '.join(contract.compute_capabilities)}" if contract.compute_capabilities else "any CPU"
    return {
        "architecture": architecture_in_words(contract.architecture),
        "runs_on": f"{cards}, host {contract.platform}, {contract.accepted_runtime}",
        "computes_in": f"{contract.activation_dtype}, weights {contract.weight_dtype}",
        "taps": [_tap_in_words(contract, num_layers, tap) for tap in contract.taps],
        "inputs": [_tensor_in_words(tensor) for tensor in contract.tensors if tensor.role == "input"],
        "largest_batch": f"{limits.max_num_tokens} tokens, {limits.max_batch_size} sequences, {limits.max_padded_tokens} "
        f"padded tokens; a sequence at most {limits.max_seq_len} tokens",
        "profiles": [_profile_in_words(profile) for profile in contract.profiles] or "one for every batch",
        "memory": f"{decimal(contract.memory.host_bytes)} of host and {decimal(contract.memory.device_bytes)} of device "
        "memory at its limits, estimated",
        "canaries": _canaries_in_words(contract),
        "files": [_file_in_words(file) for file in contract.files],
        "built_by": ", ".join([f"{contract.builder} {contract.builder_version}", *contract.build.get("notes", [])]),
        "engine_fingerprint": contract.engine_fingerprint(),
        "checkpoint_fingerprint": prints.checkpoint,
        "tokenizer_fingerprint": prints.tokenizer,
        "recipe_fingerprint": prints.recipe,
    }


def _profile_in_words(profile: Profile) -> str:
    return (
        f"{profile.max_batch_size} sequences of at most {profile.max_seq_len} tokens, {profile.max_num_tokens} tokens in all"
    )


def _file_in_words(file: EngineFile) -> str:
    varies = "" if file.is_reproducible else "; its bytes may differ from build to build, the fingerprint does not"
    return f"{file.name}, {decimal(file.size)}{varies}"


def _tap_in_words(contract: Contract, num_layers: int, tap: Tap) -> str:
    return f"{tap.spelling(num_layers)} in {_tensor_in_words(contract.output_of(tap))}"


def _tensor_in_words(tensor: TensorSpec) -> str:
    return f"{tensor.name} {tensor.dtype} [{', '.join(map(str, tensor.shape))}]"


def _canaries_in_words(contract: Contract) -> str:
    states = [state for canary in contract.canaries for state in canary.states]
    if not states:
        return "none: this engine cannot prove itself"
    sources = sorted({canary.source for canary in contract.canaries})
    nearest = min(state.confusion / state.tolerance for state in states)
    return f"{len(contract.canaries)} sequences from {', '.join(sources)}; the nearest confusion is {nearest:.0f} tolerances away"
