"""When a run looks, saves and begins anew; a full disk; settings that are refused."""

import errno
from pathlib import Path

import pytest
import torch
from small import make_run
from torch import nn

from torchrl_vla import topology as topo
from torchrl_vla.loops.plans import CheckpointPlan, EvaluationPlan
from torchrl_vla.metrics import read_metrics


def state() -> dict:
    return {"modules": {"policy": nn.Linear(2, 2)}}


def advance(run, updates: int) -> None:
    run.count(8, 4, 1, updates=updates)
    run.record({"loss": float(updates)})


def test_updates_ask_for_saves_and_evaluations(one: topo.Topology, tmp_path: Path):
    plans = {
        "saves": CheckpointPlan(None, 4),
        "evaluation": EvaluationPlan(2, 2, None, 6, num_envs=1, videos=0),
    }
    run = make_run(tmp_path, one, updates=100, run=plans)
    due = []
    for updates in range(2, 15, 2):
        advance(run, updates)
        due.append((updates, run.evaluation_due(), run.save_due()))
        if run.save_due():
            run.save(state())
        if run.evaluation_due():
            run._looked = run._now()
    assert [updates for updates, _, saves in due if saves] == [4, 8, 12]
    assert [updates for updates, looks, _ in due if looks] == [6, 12]
    # a resumed run counts from its checkpoint
    again = make_run(tmp_path, one, updates=100, run=plans)
    again.begin(state(), resume=True)
    assert again.counters["updates"] == 12
    assert not again.save_due()
    advance(again, 14)
    assert not again.save_due()
    advance(again, 16)
    assert again.save_due()
    assert [row["update"] for row in read_metrics(tmp_path)] == [*range(2, 13, 2), 14, 16]


def test_a_run_that_reached_no_checkpoint_starts_anew(one: topo.Topology, tmp_path: Path, capsys):
    run = make_run(tmp_path, one, updates=100)
    run.record({})
    advance(run, 2)
    again = make_run(tmp_path, one, updates=100)
    assert again.begin(state(), resume=True) is None
    assert "reached no checkpoint: it starts anew" in capsys.readouterr().out
    again.record({})
    advance(again, 2)
    assert [row["update"] for row in read_metrics(tmp_path)] == [0, 2]


def test_random_numbers_go_on(one: topo.Topology, tmp_path: Path):
    run = make_run(tmp_path, one, updates=100)
    advance(run, 2)
    run.save(state())
    wanted = torch.rand(3)
    again = make_run(tmp_path, one, updates=100)
    torch.manual_seed(5)
    again.begin(state(), resume=True)
    assert torch.equal(torch.rand(3), wanted)


def test_a_row_that_the_disk_does_not_take(one: topo.Topology, tmp_path: Path, monkeypatch):
    run = make_run(tmp_path, one, updates=100)
    advance(run, 2)
    run.save(state())

    def full(row, step):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run.log, "log", full)
    said = (
        r"a row of .*metrics.jsonl does not fit on the disk .* last checkpoint is .*step-000000002"
    )
    with pytest.raises(OSError, match=said):
        advance(run, 4)
    assert run.checkpoints.latest(one) is not None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CheckpointPlan(every_minutes=0), "checkpoint.every_minutes is 0"),
        (lambda: CheckpointPlan(every_updates=-1), "checkpoint.every_updates is -1"),
        (lambda: EvaluationPlan(every_updates=0), "evaluation.every_updates is 0"),
        (lambda: EvaluationPlan(episodes=0), "evaluation.episodes is 0"),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()
