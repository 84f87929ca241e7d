"""Stand-ins for the engine directories that trtllm-build writes: config.json and a file that names tensors."""

import copy
import json
from pathlib import Path

INPUTS = (
    "input_ids", "position_ids", "last_token_ids", "context_lengths", "host_context_lengths", "host_request_types",
    "host_max_attention_window_sizes", "host_sink_token_length", "host_runtime_perf_knobs", "host_context_progress",
)  # fmt: skip
OUTPUTS = ("logits", "final_post_all", "final_post_last")

CONFIG = {
    "version": "0.16.0",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "logits_dtype": "float16",
        "hidden_size": 48,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_size": 16,
        "intermediate_size": 80,
        "vocab_size": 263,
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1, "cp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    },
    "build_config": {
        "kv_cache_type": "DISABLED",
        "max_batch_size": 64,
        "max_seq_len": 256,
        "max_num_tokens": 2048,
        "opt_num_tokens": 2048,
        "max_beam_width": 1,
        "max_draft_len": 0,
        "speculative_decoding_mode": 1,
        "gather_context_logits": False,
        "max_prompt_embedding_table_size": 0,
        "plugin_config": {
            "gpt_attention_plugin": "float16",
            "gemm_plugin": None,
            "remove_input_padding": True,
            "context_fmha": True,
            "paged_kv_cache": True,
            "use_fp8_context_fmha": False,
            "use_paged_context_fmha": False,
            "multiple_profiles": False,
            "lora_plugin": None,
            "manage_weights": False,
        },
    },
}


def write_upstream_engine(folder: Path, names=(*INPUTS, *OUTPUTS), **changes) -> Path:
    """Write an engine directory; ``changes`` are paths in config.json (``a__b``) and values, ``...`` to remove one."""
    config = copy.deepcopy(CONFIG)
    for path, value in changes.items():
        *parents, key = path.split("__")
        part = config
        for parent in parents:
            part = part[parent]
        part[key] = value
        if value is ...:
            del part[key]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "rank0.engine").write_bytes(b"\0".join([b"ftrt", *(name.encode() for name in names), b"kernels"]))
    return folder
