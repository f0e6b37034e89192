"""Deterministic runs: one that was killed and resumed equals an uninterrupted one bit for bit.

This file is also the program of the runs (``__main__`` below).
"""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from programs import composed
from safetensors.torch import load_file
from small import PPO, SUITE, arguments, make_run
from test_off_policy_loop import small_settings

from torchrl_vla import topology as topo
from torchrl_vla.actors import ActorSettings
from torchrl_vla.loops import off_policy, on_policy
from torchrl_vla.loops.plans import Budget, CheckpointPlan, EvaluationPlan, check_deterministic
from torchrl_vla.loops.run import Run
from torchrl_vla.metrics import read_metrics

NEVER_EQUAL = ("time", "wait/", "rate/", "memory/")
LOOPS = {
    "ppo": (on_policy.train, partial(arguments, PPO), 4),
    "sac": (off_policy.train, partial(small_settings, actors=ActorSettings(2, 2, 3)), 2),
}
"""Loop, its settings, and the updates between two rows of metrics."""


def plans(every: int) -> dict:
    return {
        "evaluation": EvaluationPlan(2, 2, None, 2 * every, num_envs=2, videos=0),
        "saves": CheckpointPlan(None, 2 * every),
        "deterministic": True,
    }


def main(algorithm: str, folder: Path, rows: int, dies_at: int, resume: bool) -> None:
    """Train for ``rows`` rows of metrics; be killed when row ``dies_at`` is to be written."""
    loop, settings, every = LOOPS[algorithm]
    ranks = topo.start("cpu")
    run = make_run(folder, ranks, updates=rows * every, run=plans(every))
    record = run.record

    def record_or_die(metrics: dict) -> None:
        if run.counters["updates"] == dies_at * every:
            os.kill(os.getpid(), signal.SIGKILL)
        record(metrics)

    run.record = record_or_die
    loop(run, **(settings() | {"resume": resume}))
    ranks.stop()


def start(*args: object) -> int:
    """Run this file; returns its exit code."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, args)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=1400,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return everything with numbers in a checkpoint: weights, moments, random states."""
    reader = dcp.FileSystemReader(checkpoint / "dcp")
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state | load_file(checkpoint / "rank-00000.safetensors")


def comparable(folder: Path) -> list[dict]:
    rows = read_metrics(folder)
    return [
        {name: value for name, value in row.items() if not name.startswith(NEVER_EQUAL)}
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("algorithm", LOOPS)
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, algorithm: str):
    every = LOOPS[algorithm][2]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    # saves after rows 2 and 4; killed at row 3, between two saves, and resumed
    assert start(algorithm, whole, 5, -1, False) == 0
    assert start(algorithm, cut, 5, 3, False) == -signal.SIGKILL
    saved = sorted(path.name for path in (cut / "checkpoints").iterdir())
    assert saved == [f"step-{2 * every:09d}"]
    assert start(algorithm, cut, 5, -1, True) == 0

    rows = comparable(cut)
    steps = [row["update"] for row in rows]
    assert steps == [number * every for number in range(6)]
    assert rows == comparable(whole)
    last = f"checkpoints/step-{5 * every:09d}"
    found, wanted = tensors_of(cut / last), tensors_of(whole / last)
    assert found.keys() == wanted.keys()
    assert any(key.endswith("exp_avg_sq") for key in found)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    counts = [json.loads((f / last / "shared.json").read_text()) for f in (cut, whole)]
    assert counts[0]["json"]["counters"] == counts[1]["json"]["counters"]


def test_a_clock_decides_nothing(tmp_path: Path):
    given = {"folder": tmp_path, "topology": None, "suite": SUITE, "chunk_size": 2}
    given |= {"algorithm": "small", "deterministic": True}
    said = (
        r"deterministic=true and budget.minutes=1.0, evaluation.every_minutes=1.5, "
        r"checkpoint.every_minutes=2.0: .* Set budget.minutes=null evaluation.every_minutes=null"
    )
    with pytest.raises(ValueError, match=said):
        run_of(given, Budget(minutes=1.0), EvaluationPlan())


@pytest.mark.parametrize("algorithm", ["sac", "ppo"])
def test_the_experiment_fits_every_algorithm(algorithm: str):
    cfg = composed(f"algo={algorithm}", "experiment=lock_step", "budget.updates=100")
    assert cfg.topology.deterministic
    chosen = (
        Budget(**cfg.budget),
        EvaluationPlan(**cfg.evaluation),
        CheckpointPlan(**cfg.checkpoint),
    )
    check_deterministic(*chosen)
    assert cfg.algo.get("max_lag", 0) == 0


def run_of(given: dict, budget: Budget, evaluation: EvaluationPlan) -> Run:
    ranks = topo.start("cpu")
    try:
        return Run(**(given | {"topology": ranks}), budget=budget, evaluation=evaluation)
    finally:
        ranks.stop()


if __name__ == "__main__":
    name, folder, *numbers = sys.argv[1:]
    main(name, Path(folder), int(numbers[0]), int(numbers[1]), numbers[2] == "True")
