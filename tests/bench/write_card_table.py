"""Writes the card's tables of README.md from reports of the card's benchmarks, which the card's machine wrote.

    python tests/bench/torch_h200.py --json torch.json             # on the card, like the others
    python tests/bench/card_runs.py FOLDER --state-rows 640 --json runs.json
    python tests/bench/start_time.py FOLDER --json start.json
    python tests/bench/file_to_dataset.py ENGINE FOLDER --json dataset.json
    python tests/bench/torch_fidelity.py CHECKPOINT --recipe smollm2-135m --draws 100 --json fidelity.json
    python tests/bench/write_card_table.py torch.json runs.json start.json dataset.json fidelity.json
"""

import argparse
import json

from write_table import README, replaced

PRODUCTS = "products alone"
OPERATIONS = "operations"
NOT_INSTALLED = "No module named"
PEERS = ("transformers", "vllm")
_VERSIONS = {
    "driver": "driver", "cuda": "CUDA", "torch": "torch", "triton": "Triton", "quack": "QuACK", "transformers": "transformers",
    "vllm": "vLLM",
}  # fmt: skip


def tables(reports: list[dict]) -> str:
    """The reports as Markdown, each kind in a table of its own."""
    kinds = {"sittings": speeds, "starts": starts, "median": datasets, "cosines": fidelity}
    return "\n\n".join(write([r for r in reports if key in r]) for key, write in kinds.items() if any(key in r for r in reports))


def speeds(reports: list[dict]) -> str:
    """Reports of torch_h200.py and card_runs.py: a line a contender, under its sitting, and what each was measured on."""
    lines = ["| | tokens/s | TFLOP/s | of its products alone | beside |", "|---|---:|---:|---:|---|"]
    notes = []
    for report in reports:
        for part in report["sittings"]:
            if part["name"] == OPERATIONS:
                continue
            num_rounds = len(part["rows"][0]["rounds_ms"])
            title = f"**{part['name']}**, {num_rounds} round{'s' if num_rounds > 1 else ''}"
            lines += [f"| {title} | | | | |", *(_line(row, part) for row in part["rows"])]
        notes += [f"{note.partition(chr(10))[0]}." for note in report["notes"] if NOT_INSTALLED not in note]
        notes.append(f"{', '.join(part['name'] for part in report['sittings'])}: {_measured_on(report)}")
    batch = reports[0]["batch"]
    head = (
        f"Random weights, so for speed only, and ours in fp8 has every product in FP8: what that does to a real model's states is in the rows "
        f"of cosines. {batch['num_tokens']:,} packed tokens a batch, {batch['length']} a sequence unless said otherwise (mixed: log-normal, mean "
        f"128, 1 to {batch['long']:,}); medians of interleaved rounds. Rows compare within their part alone: the card's clock and temperature "
        "are another in the next. The products alone are all of them, over every row; a pass looks up the first layer's queries, keys and "
        f"values, and computes the highest layer for last rows. The share is of the products' tokens/s; over other lengths than {batch['length']} "
        "of their TFLOP/s, attention's counted."
    )
    alone = [line for report in reports for part in report["sittings"] if part["name"] == OPERATIONS for line in operations(part, batch["num_tokens"])]
    return "\n".join([head, "", *lines, "", *alone, *notes])


def operations(part: dict, num_rows: int) -> list[str]:
    """The sitting of operations: a line for each of ours, with the times of what takes its place."""
    lines = [f"| over {num_rows:,} rows, FP8 where it quantises; attention in bfloat16, sequences x tokens | us | TFLOP/s | what takes its place, us |"]
    lines.append("|---|---:|---:|---|")
    times = {row["name"]: f"{row['ms'] * 1e3:,.1f}" for row in part["rows"]}
    rivals: dict[str, list[str]] = {}
    for pair in part["ratios"]:
        ours, other = pair.split(" / ")
        rivals.setdefault(ours, []).append(f"{other.removeprefix(ours).strip()} {times[other]}")
    for row in part["rows"]:
        if row["name"] in rivals:
            tflops = f"{row['tflops']:,.0f}" if "tflops" in row else ""
            lines.append(f"| {row['name']} | {times[row['name']]} | {tflops} | {', '.join(rivals[row['name']])} |")
    return [*lines, ""]


def starts(reports: list[dict]) -> str:
    """Reports of start_time.py."""
    lines = ["| from nothing to an open engine, not yet proven; 7B in the page cache | seconds | interpreter, imports, end | weights | the rest of opening |"]
    lines.append("|---|---:|---:|---:|---:|")
    for report in reports:
        for start, spent in report["starts"].items():
            what = "nothing compiled is kept" if start == "first" else "what the first start compiled is kept"
            parts = " | ".join(f"{spent[part]:.1f}" for part in ("all", "interpreter and imports", "weights", "the rest of opening"))
            lines.append(f"| llama-2-7b {report['precision']}, {start} start: {what} | {parts} |")
    return "\n".join([*lines, "", *dict.fromkeys(map(_measured_on, reports))])


def datasets(reports: list[dict]) -> str:
    """Reports of file_to_dataset.py."""
    lines = ["| from a file of ids to a closed Lance dataset | engine, tokens/s | run, tokens/s | of the engine | a million, extrapolated |"]
    lines.append("|---|---:|---:|---:|---:|")
    for report in reports:
        median = report["median"]
        what = f"{report['model']} {report['precision']}, {report['rows']:,} x {report['length']} ids, {report['format']}, {len(report['rounds'])} rounds"
        rates = f"{median['engine tokens/s']:,.0f} | {median['run tokens/s']:,.0f}"
        lines.append(f"| {what} | {rates} | {median['ratio']:.3f} | {median['ratio of a million']:.3f} |")
    return "\n".join([*lines, "", *dict.fromkeys(map(_measured_on, reports))])


def fidelity(reports: list[dict]) -> str:
    """Reports of torch_fidelity.py: cosines of rows with float32."""
    lines = ["| cosine with float32 | tap | mean | 0.1 % quantile | minimum | rows |", "|---|---|---:|---:|---:|---:|"]
    notes = []
    for report in reports:
        for precision, taps in report["cosines"].items():
            for tap, row in taps.items():
                figures = f"{row['mean']:.6f} | {row['quantile']:.5f} | {row['min']:.5f} | {row['rows']:,}"
                lines.append(f"| {report['model']}, {precision.replace('kept', 'kept in bfloat16')} | {tap} | {figures} |")
        for precision, drawn in report["draws"].items():
            low = drawn["lowest"]
            notes.append(
                f"Lowest final@last of {drawn['num_draws']} draws of rounding errors, {precision}: median {low['median']:.5f}, {low['min']:.5f} to "
                f"{low['max']:.5f}, at least {drawn['least']} in {drawn['share_of_draws_at_least']:.0%}."
            )
        notes.append(f"{report['num_prompts']} held-out prompts, {report['num_tokens']:,} tokens. {_measured_on(report)}")
    return "\n".join([*lines, "", *notes])


def _line(row: dict, part: dict) -> str:
    cells = [row["name"], f"{row['tokens_per_s']:,}", f"{row['tflops']:,.0f}" if "tflops" in row else "", _share(row, part)]
    return f"| {' | '.join([*cells, _beside(row['name'], part['ratios'])])} |"


def _share(row: dict, part: dict) -> str:
    """Of the speed of the products of the same model and precision, timed in the same rounds: see the head."""
    words = row["name"].split()
    products, kind = {other["name"]: other for other in part["rows"]}.get(" ".join([*words[:2], PRODUCTS])), words[2:]
    if products is None or products is row:
        return ""
    is_other_length = kind and (kind[0] == "mixed" or kind[0].isdigit())
    speed = "tflops" if is_other_length else "tokens_per_s"
    return f"{row[speed] / products[speed]:.3f}"


def _beside(name: str, ratios: dict[str, float]) -> str:
    """How many times faster ours are than a peer; or the shares of other rows of ours, and of the disk."""
    of = {tuple(pair.split(" / ")): ratio for pair, ratio in ratios.items()}
    if _is_peer(name):
        return "ours: " + ", ".join(f"{one.split()[1]} {ratio:.2f} times" for (one, other), ratio in of.items() if other == name)
    limits = [other for one, other in of if one == name and not other.endswith(PRODUCTS) and not _is_peer(other)]
    return ", ".join(f"{of[name, other]:.3f} of {other}" for other in limits)


def _is_peer(name: str) -> bool:
    return name.split()[1:2] in [[peer] for peer in PEERS]


def _measured_on(report: dict) -> str:
    machine, clocks = report["machine"], [clock for part in report.get("sittings", []) for clock in part["clocks_mhz"]]
    versions = ", ".join(f"{name} {machine[key]}" for key, name in _VERSIONS.items() if key in machine)
    clock = f"SM clock {min(clocks):,} to {max(clocks):,} MHz, " if clocks else ""
    return f"{machine['card']}, {clock}{versions}; commit {machine['commit']}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("reports", nargs="+", help="what the card's benchmarks wrote")
    arguments = parser.parse_args()
    reports = []
    for path in arguments.reports:
        with open(path) as file:
            reports.append(json.load(file))
    README.write_text(replaced(README.read_text(encoding="utf-8"), tables(reports), "card"), encoding="utf-8")


if __name__ == "__main__":
    main()
