"""A run over many short rows, measured from within: ``python measured_run.py NUM_ROWS FOLDER`` prints resident memory.

Prints JSON: resident bytes when each tenth of the input lay behind, the report, and the same of a resumed run.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "backends")]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from toy_engines import NAN_TOKEN, Toy, write_engine  # noqa: E402
from toy_jobs import run  # noqa: E402

from tensorrt_llm_ext.job import window_limits  # noqa: E402
from tensorrt_llm_ext.recipes.contract import Limits  # noqa: E402

LIMITS = Limits(max_num_tokens=2048, max_batch_size=512, max_seq_len=40, max_padded_tokens=4096)


def write_rows(path, num_rows):
    rng = np.random.default_rng(0)
    with open(path, "w") as file:
        for row in range(num_rows):
            ids = rng.integers(0, NAN_TOKEN, size=rng.integers(1, 9)).tolist()
            file.write(json.dumps({"id": f"request-{row:09}", "ids": ids}) + "\n")


def measured(engine, prompts, out, **options):
    process, resident = psutil.Process(), []

    def sample(progress):
        if progress.fraction >= (len(resident) + 1) / 10:
            resident.append(process.memory_info().rss)

    report = run(engine, prompts, out, progress=sample, windows=window_limits(LIMITS), **options)
    return {"resident": resident, "report": report.to_dict()}


def main(num_rows, folder):
    folder = Path(folder)
    engine = write_engine(folder / "engine", Toy(limits=LIMITS))
    write_rows(folder / "prompts.jsonl", int(num_rows))
    first = measured(engine, folder / "prompts.jsonl", folder / "out")
    resumed = measured(engine, folder / "prompts.jsonl", folder / "out", resume=True)
    print(json.dumps({"first": first, "resumed": resumed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
