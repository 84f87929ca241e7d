"""Runs that are killed: a process that has imported everything forks one child a run, and each child dies by SIGKILL.

``python killed_runs.py ENGINE PROMPTS FOLDER SCENARIOS``: SCENARIOS is JSON, for each output folder a list of deaths;
a death is ``[step, number, moment]`` (at the ``number``-th call of the step, ``before`` or ``after`` it) or a number
of seconds; a run that ends before that is removed and begun anew with fewer. After its deaths the run is resumed to its end. Prints how many children died of each list.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "backends")]

import lance  # noqa: E402
from toy_jobs import run  # noqa: E402

from tensorrt_llm_ext.job.ledgers import FailedLedger, RefusedLedger  # noqa: E402
from tensorrt_llm_ext.store import states, vectors  # noqa: E402

STEPS = {
    "create": (lance, "write_dataset"),
    "extend": (vectors.VectorStore, "extend"),
    "write": (vectors, "write_fragments"),
    "commit": (lance.LanceDataset, "commit"),
    "failed": (FailedLedger, "write"),
    "publish": (RefusedLedger, "publish"),
    "write json": (states, "write_json"),  # the header, then the manifest
    "append states": (states.ShardBuffer, "place"),
    "commit states": (states.StatesStore, "commit"),
    "write shard": (states, "write_shard"),
    "write index": (states, "write_part"),
    "publish index": (states, "publish_part"),
}


def killed(engine, prompts, folder, scenarios, timeout_s=120):
    """Run this file in a process of its own: how many children died of each scenario."""
    command = [sys.executable, __file__, str(engine), str(prompts), str(folder), json.dumps(scenarios)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def plant(step, number, moment):
    place, name = STEPS[step]
    original, calls = getattr(place, name), iter(range(10**6))

    def deadly(*args, **kwargs):
        is_last = next(calls) == number
        if is_last and moment == "before":
            die()
        result = original(*args, **kwargs)
        if is_last:
            die()
        return result

    setattr(place, name, staticmethod(deadly) if place is lance.LanceDataset else deadly)


def run_in_a_child(engine, prompts, out, death):
    """Run in a fork; return True when it died of SIGKILL, False when it came to its end."""
    child = os.fork()
    if child == 0:
        try:
            if isinstance(death, list):
                plant(*death)
            report = run(engine, prompts, out, resume=True)
            os._exit(0 if report.shortfall == 0 and report.stopped_by is None else 3)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(4)
    if isinstance(death, float):
        time.sleep(death)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return True
    assert os.waitstatus_to_exitcode(status) == 0, f"{out}: exit {os.waitstatus_to_exitcode(status)} after {death}"
    return False


def dies(engine, prompts, out, death):
    """Run and be killed; a run that ends before its moment comes begins anew with an earlier one, so that each kills."""
    if isinstance(death, list):
        return run_in_a_child(engine, prompts, out, death)
    for _ in range(20):
        if run_in_a_child(engine, prompts, out, death):
            return True
        shutil.rmtree(out)
        death *= 0.6
    return False


def main(engine, prompts, folder, scenarios):
    died = {}
    for name, deaths in json.loads(scenarios).items():
        died[name] = sum(dies(Path(engine), Path(prompts), Path(folder) / name, death) for death in deaths)
        assert not run_in_a_child(Path(engine), Path(prompts), Path(folder) / name, None)
    print(json.dumps(died))


if __name__ == "__main__":
    main(*sys.argv[1:])
