"""``launch/train.py`` as a scheduler sees it: a signal, exit code 75, and the run goes on later."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrl_vla.metrics import read_metrics
from torchrl_vla.signals import RESUME_ME

TRAIN = Path(__file__).parents[2] / "launch" / "train.py"
SMALL = (
    "algo=ppo",
    "resume=auto",
    "logger.display=false",
    "topology.device=cpu",
    "algo.actors.num_workers=1",
    "algo.actors.envs_per_worker=4",
    "algo.actors.decisions_per_env=4",
    "budget.minutes=null",
    "evaluation.episodes=1",
    "evaluation.final_episodes=1",
    "evaluation.num_envs=1",
    "evaluation.videos=0",
)


def start(folder: Path, *overrides: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(TRAIN), f"run_dir={folder}", *SMALL, *overrides],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_rows(process: subprocess.Popen, folder: Path, number: int) -> None:
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder)) < number:
        assert process.poll() is None, process.stdout.read()[-3000:]
        time.sleep(0.05)


@pytest.mark.slow
def test_a_signal_saves_and_the_run_goes_on_later(tmp_path: Path):
    process = start(tmp_path, "budget.updates=1000000")
    wait_for_rows(process, tmp_path, 3)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate()
    assert process.returncode == RESUME_ME, said[-3000:]
    stopped = json.loads((tmp_path / "stopped.json").read_text())
    assert stopped["signal"] == "SIGTERM"
    assert f"saved at update {stopped['update']}" in said
    assert read_metrics(tmp_path)[-1]["update"] == stopped["update"]
    assert len(json.loads((tmp_path / "eval.json").read_text())["history"]) == 1

    more = start(tmp_path, f"budget.updates={stopped['update'] + 1}")
    said, _ = more.communicate()
    assert more.returncode == 0, said[-3000:]
    assert f"resumed step-{stopped['update']:09d}" in said
    assert not (tmp_path / "stopped.json").exists()
    steps = [row["update"] for row in read_metrics(tmp_path)]
    assert steps == sorted(set(steps))
    assert steps[-1] > stopped["update"]
