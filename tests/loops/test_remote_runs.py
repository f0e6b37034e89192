"""Off-policy runs whose actors are remote processes: counts, metrics, an end with nobody there."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from remote_network import eventually, free_port
from remote_nursery import Nursery
from small import CHUNK, SUITE, make_run
from test_off_policy_loop import small_settings

from torchrl_vla import topology as topo
from torchrl_vla.actors import ActorSettings
from torchrl_vla.loops.off_policy import train
from torchrl_vla.loops.plans import Budget, CheckpointPlan, EvaluationPlan
from torchrl_vla.metrics import read_metrics
from torchrl_vla.remote import Listening
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.layout import transition_layout

pytestmark = pytest.mark.slow  # several processes and restarts each

SECRET = b"s" * 40


@pytest.fixture(scope="module")
def nursery():
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def one(nursery):
    ranks = topo.start("cpu")
    yield ranks
    ranks.stop()


def remote_settings(port: int = 0, **changes) -> dict:
    where = Listening("127.0.0.1", port, SECRET, {"small": True})
    return small_settings(remote=where, actors=ActorSettings(2, 4, 3, 30.0), **changes)


def learn(folder: Path, port: int, updates: int) -> None:
    """Train to the end as a process of its own; goes on with what is in ``folder``."""
    ranks = topo.start("cpu")
    saves = CheckpointPlan(None, every_updates=4)
    resume = (folder / "checkpoints").exists()
    run = make_run(folder, ranks, updates=updates, run={"saves": saves})
    train(run, **remote_settings(port, resume=resume))
    (folder / "learner.json").write_text(json.dumps(run.counters))
    ranks.stop()


def updates_of(folder: Path) -> int:
    if not (folder / "metrics.jsonl").exists():
        return 0
    return max((row["update"] for row in read_metrics(folder)), default=0)


def test_a_run_with_remote_actors(one: topo.Topology, nursery: Nursery, tmp_path: Path):
    port = free_port()
    born = [
        nursery.actor(("127.0.0.1", port), SECRET, name, tmp_path / f"{name}.json") for name in "ab"
    ]
    train(make_run(tmp_path, one, updates=40), **remote_settings(port))
    rows = [row for row in read_metrics(tmp_path) if row["update"]]
    assert rows[-1]["update"] == 40
    assert max(row["actors/remote"] for row in rows) >= 1
    for row in rows:
        assert row["update"] <= 4 + 0.5 * (row["decisions"] - 24)
        assert row["policy_lag"] >= 0
    reports = [actor.report() for actor in born]
    assert all(report["lost"] == 0 for report in reports)
    assert sum(report["rows"] for report in reports) >= rows[-1]["decisions"] > 24


def test_a_learner_that_is_killed_goes_on_with_the_actors_that_are_there(
    nursery: Nursery, tmp_path: Path
):
    port = free_port()
    actors = [
        nursery.actor(("127.0.0.1", port), SECRET, name, tmp_path / f"{name}.json") for name in "ab"
    ]
    report = tmp_path / "learner.json"
    for goal in (5, 9):
        learner = nursery.start(learn, (tmp_path, port, 14), report)
        eventually(lambda goal=goal: updates_of(tmp_path) >= goal)
        learner.kill()
        assert all(actor.alive() for actor in actors)
    counters = nursery.start(learn, (tmp_path, port, 14), report).report()
    assert counters["updates"] == 14
    assert all(actor.report()["lost"] == 0 for actor in actors)
    logged = [row for row in read_metrics(tmp_path) if row["update"]]
    assert [row["update"] for row in logged] == list(range(2, 15, 2))
    for row in logged:
        assert row["replay/rows"] == row["decisions"]
        assert row["policy_lag"] >= 0
    folder = tmp_path / "replay" / "rank-0"
    layout = transition_layout(SUITE.meta, CHUNK, [])
    rows = JournalStorage.attached(folder, layout)[:]
    keys = zip(
        rows["episode_id"].flatten().tolist(), rows["decision"].flatten().tolist(), strict=True
    )
    assert max(Counter(keys).values()) == 1
    assert len(rows) >= counters["decisions"]


def test_a_run_that_nobody_joins_ends_when_it_should(one: topo.Topology, tmp_path: Path):
    asked_at = time.monotonic() + 3
    run = make_run(tmp_path, one, updates=4)
    run.stop_asked = lambda: time.monotonic() > asked_at
    train(run, **remote_settings())
    assert run.interrupted
    assert run.counters["updates"] == 0
    assert [row["update"] for row in read_metrics(tmp_path)] == [0]
    assert len(list((tmp_path / "checkpoints").iterdir())) == 1


def test_lock_step_with_remote_actors_is_refused(one: topo.Topology, tmp_path: Path):
    plans = {
        "deterministic": True,
        "evaluation": EvaluationPlan(2, 2, every_minutes=None, num_envs=2, videos=0),
        "saves": CheckpointPlan(None, every_updates=2),
    }
    run = make_run(tmp_path, one, updates=4, run=plans)
    assert run.budget == Budget(updates=4)
    with pytest.raises(ValueError, match="use topology=local"):
        train(run, **remote_settings())
