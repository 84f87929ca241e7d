"""The README's table holds what was measured, between its markers, and nothing around it changes."""

import sys
from pathlib import Path

import pytest

from tensorrt_llm_ext.checks import BenchResult
from tensorrt_llm_ext.checks.bench import Timing

sys.path.append(str(Path(__file__).parent))

import write_card_table  # noqa: E402
import write_demo  # noqa: E402
import write_table  # noqa: E402

MACHINE = {"cpu": "a CPU", "onnxruntime": "1", "torch": "2", "transformers": "5", "python": "3", "system": "Linux", "commit": "abc+"}
RESULT = BenchResult(
    model="tiny",
    num_prompts=3,
    num_tokens=1234,
    longest=9,
    num_threads=2,
    num_rounds=3,
    timings=(
        Timing("this engine", "float32", "packed", 900.0, 1.0, (1.0,), 1.0),
        Timing("transformers", "float32", "padded", 300.0, 1.0, (1.0,), None),
    ),
    ratios={},
    notes=("something is left out",),
    machine=MACHINE,
)


def test_the_table_has_a_line_a_contender_with_the_ratio_to_ours():
    lines = write_table.table(RESULT).splitlines()
    assert lines[0].startswith("tiny: 3 prompts of 1 to 9 tokens, 1,234 in all; 2 threads of a CPU")
    assert "| this engine | float32 | packed | 900 | 1.00 | 1.000000 |" in lines
    assert "| transformers | float32 | padded | 300 | 3.00 |  |" in lines
    assert lines[-2] == "something is left out." and lines[-1].endswith("commit abc+.")


def test_only_what_is_between_the_markers_changes():
    text = "before <!-- bench:cpu -->\nold\n<!-- /bench:cpu --> after\n"
    once = write_table.replaced(text, "new")
    assert once == "before <!-- bench:cpu -->\nnew\n<!-- /bench:cpu --> after\n"
    assert write_table.replaced(once, "new") == once


@pytest.mark.parametrize("text", ["", "<!-- bench:cpu -->", "<!-- /bench:cpu --> <!-- bench:cpu -->"])
def test_without_both_markers_nothing_is_written(text):
    with pytest.raises(SystemExit, match="expected one <!-- bench:cpu -->"):
        write_table.replaced(text, "new")


def card_report():
    """A sitting with ours, our limit and a peer, as the benchmark of the card writes it."""

    def row(name, rate, tflops=None):
        return {"name": name, "tokens_per_s": rate, "rounds_ms": [1, 1, 1]} | ({} if tflops is None else {"tflops": tflops})

    rows = [
        row("m fp8", 90, 850),
        row("m fp8 products alone", 100, 1000),
        row("m fp8 mixed", 81, 840),
        row("m fp8 2048", 70, 800),
        row("m fp8 deterministic", 89, 845),
        row("m fp8 ids to host vectors", 88),
        row("m vllm bf16 16384", 45),
    ]
    ratios = {"m fp8 / m fp8 products alone": 0.9, "m fp8 mixed / m fp8": 0.9, "m fp8 deterministic / m fp8": 0.989, "m fp8 / m vllm bf16 16384": 2.0}
    machine = {"card": "a card", "driver": "1", "cuda": "13", "torch": "2", "triton": "3", "vllm": "0.25.1", "commit": "abc"}
    sitting = {"name": "peers", "rows": rows, "ratios": ratios, "clocks_mhz": [1500, 1400]}
    batch = {"num_tokens": 16384, "length": 128, "long": 2048}
    return {"machine": machine, "batch": batch, "sittings": [sitting], "notes": ["left out: x\n  log"]}


def test_a_card_s_table_holds_each_contender_against_the_products_and_against_ours():
    lines = write_card_table.speeds([card_report()]).splitlines()
    assert "16,384 packed tokens a batch, 128 a sequence unless said otherwise" in lines[0]
    assert "ours in fp8 has every product in FP8" in lines[0]
    assert lines[4:12] == [
        "| **peers**, 3 rounds | | | | |",
        "| m fp8 | 90 | 850 | 0.900 |  |",  # of tokens/s at the products' length
        "| m fp8 products alone | 100 | 1,000 |  |  |",
        "| m fp8 mixed | 81 | 840 | 0.840 | 0.900 of m fp8 |",  # of TFLOP/s at another
        "| m fp8 2048 | 70 | 800 | 0.800 |  |",
        "| m fp8 deterministic | 89 | 845 | 0.890 | 0.989 of m fp8 |",
        "| m fp8 ids to host vectors | 88 |  | 0.880 |  |",
        "| m vllm bf16 16384 | 45 |  |  | ours: fp8 2.00 times |",
    ]
    versions = "driver 1, CUDA 13, torch 2, Triton 3, vLLM 0.25.1; commit abc."
    assert lines[-2:] == ["left out: x.", f"peers: a card, SM clock 1,400 to 1,500 MHz, {versions}"]


def test_a_run_s_line_has_its_share_of_the_card_s_speed_and_of_the_disk_s():
    report = card_report()
    rows = [{"name": name, "tokens_per_s": 10, "rounds_ms": [1]} for name in ("m fp8 passes", "dd to disk", "m fp8 run to disk")]
    ratios = {"m fp8 run to disk / m fp8 passes": 0.5, "m fp8 run to disk / dd to disk": 0.95}
    report["sittings"].append({"name": "states", "rows": rows, "ratios": ratios, "clocks_mhz": [1500]})
    lines = write_card_table.speeds([report]).splitlines()
    assert lines[12:16] == [
        "| **states**, 1 round | | | | |",
        "| m fp8 passes | 10 |  |  |  |",
        "| dd to disk | 10 |  |  |  |",
        "| m fp8 run to disk | 10 |  |  | 0.500 of m fp8 passes, 0.950 of dd to disk |",
    ]


def test_an_operation_s_line_has_the_times_of_what_takes_its_place():
    report = card_report()
    report["notes"].append("attention by flash is left out: No module named 'flash'")  # of no interest to a reader
    names = ("take", "take compiled", "attention 2 x 128", "attention 2 x 128 flash", "attention 2 x 128 cudnn")
    rows = [{"name": name, "ms": 0.001 * number, "tokens_per_s": 10, "rounds_ms": [1]} for number, name in enumerate(names, 1)]
    rows[2]["tflops"] = rows[3]["tflops"] = 500
    ratios = {"take / take compiled": 1.5, "attention 2 x 128 / attention 2 x 128 flash": 0.9, "attention 2 x 128 / attention 2 x 128 cudnn": 1}
    report["sittings"].append({"name": "operations", "rows": rows, "ratios": ratios, "clocks_mhz": [1500]})
    lines = write_card_table.speeds([report]).splitlines()
    first = lines.index("| take | 1.0 |  | compiled 2.0 |")
    assert lines[first + 1] == "| attention 2 x 128 | 3.0 | 500 | flash 4.0, cudnn 5.0 |" and lines[first + 2] == ""
    assert "**operations**" not in "".join(lines) and "No module" not in "".join(lines) and lines[-1].startswith("peers, operations: ")


def test_datasets_and_fidelity_have_tables_of_their_own():
    machine = {"card": "a card", "driver": "1", "torch": "2", "commit": "abc"}
    median = {"engine tokens/s": 2000.4, "run tokens/s": 1900, "ratio": 0.95, "ratio of a million": 0.96}
    dataset = {"machine": machine, "median": median, "rounds": [median] * 3, "model": "m", "precision": "fp8", "rows": 50000, "length": 128, "format": "jsonl"}
    row = {"mean": 0.99981, "quantile": 0.998, "min": 0.99685, "rows": 1200}
    lowest = {"median": 0.997, "min": 0.99, "max": 0.999}
    drawn = {"num_draws": 9, "least": 0.995, "lowest": lowest, "share_of_draws_at_least": 0.88, "share_below_by_prompt": {}}
    fidelity = {"machine": machine, "model": "m", "num_prompts": 200, "num_tokens": 7788, "cosines": {"bfloat16": {"final@last": row}}, "draws": {"fp8": drawn}}
    lines = write_card_table.tables([fidelity, dataset]).splitlines()
    assert lines[2] == "| m fp8, 50,000 x 128 ids, jsonl, 3 rounds | 2,000 | 1,900 | 0.950 | 0.960 |"
    assert lines[4] == "a card, driver 1, torch 2; commit abc."
    assert lines[8] == "| m, bfloat16 | final@last | 0.999810 | 0.99800 | 0.99685 | 1,200 |"
    assert lines[10:] == [
        "Lowest final@last of 9 draws of rounding errors, fp8: median 0.99700, 0.99000 to 0.99900, at least 0.995 in 88%.",
        "200 held-out prompts, 7,788 tokens. a card, driver 1, torch 2; commit abc.",
    ]


def test_the_demo_s_block_begins_with_its_summary():
    assert write_demo.summary("Built\nstored          2\nread            2\n\nNearest\n") == "```\nstored          2\nread            2\n\nNearest\n```"
    with pytest.raises(ValueError):
        write_demo.summary("Error: no engine\n")


def test_the_table_of_starts_takes_each_apart():
    spent = {"all": 61.23, "interpreter and imports": 9.0, "weights": 7.26, "the rest of opening": 44.97}
    starts = {"first": spent, "second": dict.fromkeys(spent, 1.0)}
    report = {"machine": card_report()["machine"], "precision": "fp8", "starts": starts}
    lines = write_card_table.tables([report]).splitlines()
    assert "| llama-2-7b fp8, first start: nothing compiled is kept | 61.2 | 9.0 | 7.3 | 45.0 |" in lines
    assert "| llama-2-7b fp8, second start: what the first start compiled is kept | 1.0 | 1.0 | 1.0 | 1.0 |" in lines
    assert lines[-1].startswith("a card, driver 1") and lines[-1].endswith("commit abc.")
