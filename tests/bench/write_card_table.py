"""Writes the card's table of README.md from the report of torch_h200.py: the machine with the card need not have the README.

    python tests/bench/torch_h200.py --json torch.json             # on the card
    python tests/bench/write_card_table.py torch.json [--commit OF_THAT_TREE]
"""

import argparse
import json

from write_table import README, replaced

PRODUCTS = "products alone"


def table(report: dict) -> str:
    """The report as Markdown: every contender, and its speed against the products of the same model and precision alone."""
    rates = {row["name"]: row["tokens_per_s"] for row in report["rows"]}
    lines = ["| | tokens/s | of its matrix products alone |", "|---|---:|---:|"]
    for name, rate in rates.items():
        limit = rates.get(" ".join([*name.split()[:2], PRODUCTS]).replace(",", ""))
        has_limit = limit and not name.endswith(PRODUCTS) and " mixed" not in name and " 2048" not in name
        lines.append(f"| {name} | {rate:,} | {f'{rate / limit:.3f}' if has_limit else ''} |")
    machine, clocks = report["machine"], report["clocks_mhz"]
    return "\n".join(
        [
            "Random weights, so for speed only; 16,384 packed tokens a batch, 128 a sequence unless said otherwise (mixed: log-normal, mean "
            "128, 1 to 2,048); medians of 3 interleaved rounds.",
            "",
            *lines,
            "",
            f"{machine['card']}, SM clock {min(clocks):,} to {max(clocks):,} MHz, driver {machine['driver']}, CUDA {machine['cuda']}, "
            f"torch {machine['torch']}, Triton {machine['triton']}; commit {machine['commit']}.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("report", help="what torch_h200.py wrote")
    parser.add_argument("--commit", help="of the tree that was measured, where its history was elsewhere")
    arguments = parser.parse_args()
    with open(arguments.report) as file:
        report = json.load(file)
    if arguments.commit:
        report["machine"]["commit"] = arguments.commit
    README.write_text(replaced(README.read_text(encoding="utf-8"), table(report), "card"), encoding="utf-8")


if __name__ == "__main__":
    main()
