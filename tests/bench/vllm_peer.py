"""The peer: vLLM's pooling runner on the shape of a model with random weights; tokens a second as one line of JSON.

    python tests/bench/vllm_peer.py CONFIG_FOLDER [--quantization fp8] [--max-num-batched-tokens 16384]

CONFIG_FOLDER holds a config.json and any tokenizer.json and tokenizer_config.json. One process measures one setting: vLLM
does not give its memory back. Ids go in and vectors come out on the host, as users see it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np

NUM_BATCHES, LENGTH, ROUNDS = 8, 128, 3


def main() -> None:
    arguments = _arguments()
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
    import vllm  # reads the environment when it is imported

    num_tokens = arguments.max_num_batched_tokens
    model = vllm.LLM(
        arguments.folder,
        runner="pooling",
        convert="embed",
        dtype="bfloat16",
        quantization=arguments.quantization,
        load_format="dummy",
        max_model_len=arguments.max_model_len,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_tokens // LENGTH,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.6,
    )
    with open(os.path.join(arguments.folder, "config.json")) as file:
        vocab_size = json.load(file)["vocab_size"]
    ids = np.random.default_rng(0).integers(0, vocab_size, (NUM_BATCHES * num_tokens // LENGTH, LENGTH))
    prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
    model.embed(prompts[: num_tokens // LENGTH], use_tqdm=False)  # warm-up
    rates = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        found = model.embed(prompts, use_tqdm=False)
        rates.append(ids.size / (time.perf_counter() - started))
    if len(found) != len(prompts):
        raise SystemExit(f"{len(found)} vectors came back for {len(prompts)} prompts")
    setting = {"quantization": arguments.quantization or "none", "max_num_batched_tokens": num_tokens}
    print(json.dumps({"vllm": vllm.__version__, **setting, "tokens_per_s": round(statistics.median(rates))}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="folder of config.json and a tokenizer")
    parser.add_argument("--quantization", choices=("fp8",), help="bfloat16 unless given")
    parser.add_argument("--max-num-batched-tokens", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int, default=2048)
    return parser.parse_args()


if __name__ == "__main__":
    main()
