"""Faults in whole training runs: an actor or a rank is killed, one rank is asked to stop."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from torchrl_vla.metrics import read_metrics
from torchrl_vla.signals import RESUME_ME

EVERY = {"ppo": 6, "sac": 2}
"""Updates between two rows of metrics in ``small_run.py``."""
HERE = Path(__file__).parent
PROGRAM = HERE / "small_run.py"
PATHS = (HERE, HERE.parent, HERE.parent / "loops")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
    # Otherwise restarted ranks find the addresses of the dead ones in the agent's store, and wait.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def run(*words: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
    """Run the small training program; nothing it started may be left."""
    before = {p.pid for p in psutil.process_iter()}
    done = subprocess.run(
        [sys.executable, *launcher, str(PROGRAM), *map(str, words)],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=1400,
    )
    deadline = time.monotonic() + 20
    while (left := started_by_us(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    return done


def started_by_us(before: set[int]) -> list[psutil.Process]:
    """Return the living processes of the program that were not there ``before``."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        if process.pid in before or process.status() == psutil.STATUS_ZOMBIE:
            continue
        if str(HERE) in (process.info["environ"] or {}).get("PYTHONPATH", ""):
            found.append(process)
    return found


def updates_of(folder: Path) -> list[int]:
    return [row["update"] for row in read_metrics(folder)]


@pytest.mark.parametrize("algorithm", ["sac", pytest.param("ppo", marks=pytest.mark.slow)])
def test_a_run_goes_on_without_its_killed_actor(tmp_path: Path, algorithm: str):
    every = EVERY[algorithm]
    done = run(algorithm, tmp_path, 6 * every, "worker", 2, 0)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "ended with exit code -9" in done.stderr
    rows = read_metrics(tmp_path)
    assert [row["update"] for row in rows] == [k * every for k in range(7)]
    assert rows[-1]["actors/restarts"] == 1
    assert rows[1]["actors/restarts"] == 0
    if algorithm == "ppo":  # all of a round is of the newest version, whoever collected it
        assert all(row["policy_lag_max"] == 0 for row in rows[1:])
        assert [row["decisions"] for row in rows] == [24 * k for k in range(7)]


@pytest.mark.slow
def test_a_run_whose_folder_is_removed_ends_with_an_error_that_names_it(tmp_path: Path):
    # Field case B28: the replay's memory is mapped from files that are gone.
    folder = tmp_path / "run"
    done = run("sac", folder, 100 * EVERY["sac"], "remove", 3, 0)
    assert done.returncode == 1, done.stderr[-3000:]  # not -7, SIGBUS
    assert re.search(rf"FileNotFoundError: .*{folder}", done.stderr), done.stderr[-3000:]


@pytest.mark.slow
def test_one_rank_is_asked_to_stop_and_all_do(tmp_path: Path):
    every = EVERY["ppo"]
    done = run("ppo", tmp_path, 100 * every, "stop", 3, 1, launcher=TORCHRUN)
    assert done.returncode != 0
    assert f"exitcode  : {RESUME_ME}" in done.stderr
    facts = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert facts[0]["counters"] == facts[1]["counters"]
    assert all(fact["interrupted"] for fact in facts)
    # signalled after row 3: the next look finds it, and no evaluation is made any more
    assert updates_of(tmp_path)[-1] == facts[0]["counters"]["updates"] == 4 * every
    assert len(json.loads((tmp_path / "eval.json").read_text())["history"]) == 1
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [f"step-{k * every:09d}" for k in (2, 4)]


@pytest.mark.slow
def test_all_ranks_go_on_from_the_last_save_when_one_is_killed(tmp_path: Path):
    every = EVERY["sac"]
    launcher = (*TORCHRUN, "--max-restarts=1")
    done = run("sac", tmp_path, 8 * every, "kill", 5, 1, launcher=launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed step-000000008" in done.stdout
    assert updates_of(tmp_path) == [k * every for k in range(9)]
    facts = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert facts[0]["counters"] == facts[1]["counters"]
