"""The on-policy loop with real actors: lag, groups, rounds without data, resume, two ranks.

Run by torchrun (``__main__`` below), this file is also the program of the ranks.
"""

import json
import math
import sys
from functools import partial
from pathlib import Path

import pytest
from envs.counter import CounterSuite
from programs import torchrun
from small import GRPO, PPO, arguments, make_run

from torchrl_vla import topology as topo
from torchrl_vla.actors import ActorSettings
from torchrl_vla.loops.on_policy import train
from torchrl_vla.metrics import read_metrics

EVERYWHERE = {
    "approx_kl",
    "clip_fraction",
    "clip_fraction_high",
    "clip_fraction_low",
    "decisions",
    "effective_sample_size",
    "entropy",
    "env_steps",
    "episodes",
    "grad_norm/policy",
    "loss_policy",
    "lr/policy",
    "policy_lag",
    "policy_lag_max",
    "ratio_gap",
    "target_kl_stops",
    "train/success_rate",
    "valid_fraction",
    "wait/actors",
    "wait/learner",
}


def rows_of(folder: Path) -> list[dict]:
    """Return the rows of the rounds, without that of the first evaluation."""
    return [row for row in read_metrics(folder) if row["update"]]


def test_strict_rounds_are_of_the_newest_version(one: topo.Topology, tmp_path: Path):
    train(make_run(tmp_path, one, updates=8), **arguments(PPO))
    rows = rows_of(tmp_path)
    # rounds of 4 x 3 decisions: 2 minibatches x 2 epochs
    assert [row["update"] for row in rows] == [4, 8]
    for row in rows:
        assert set(row) >= EVERYWHERE | {"loss_value", "explained_variance", "grad_norm/value"}
        assert row["policy_lag"] == row["policy_lag_max"] == 0
        assert row["policy_lag_share/0"] == row["valid_fraction"] == 1
        assert 0 <= row["ratio_gap"] < 1e-5
        assert 0 < row["wait/actors"] < 1
        assert 0 <= row["wait/learner"] < 1
    assert rows[-1]["decisions"] == 24


def test_rounds_asked_for_ahead_are_at_most_as_old_as_allowed(one: topo.Topology, tmp_path: Path):
    train(make_run(tmp_path, one, updates=32), **arguments(PPO, max_lag=2))
    rows = rows_of(tmp_path)
    assert len(rows) == 8
    for row in rows:
        assert 0 <= row["policy_lag"] <= row["policy_lag_max"] <= 2
        shares = [row[f"policy_lag_share/{age}"] for age in range(3)]
        assert sum(shares) == pytest.approx(1)
        assert row["policy_lag"] == pytest.approx(shares[1] + 2 * shares[2])
        assert row["dropped_stale"] == 0
    assert rows[0]["policy_lag_max"] == 0
    assert max(row["policy_lag_max"] for row in rows) > 0


@pytest.mark.slow
def test_groups_wait_over_rounds_and_a_resume_counts_what_it_leaves(
    one: topo.Topology, tmp_path: Path
):
    given = arguments(GRPO, group_size=2)
    train(make_run(tmp_path, one, updates=20), **given)
    rows = rows_of(tmp_path)
    for row in rows:
        assert set(row) >= EVERYWHERE | {"zero_contrast_fraction", "held_decisions"}
        assert "loss_value" not in row
        assert row["dropped_unfinished"] == 0
    # episodes of up to 6 decisions, rounds of 3: some decisions are older than their round
    assert max(row["policy_lag_max"] for row in rows) > 0
    more = make_run(tmp_path, one, updates=30)
    train(more, **given | {"resume": True})
    resumed = rows_of(tmp_path)[len(rows) :]
    assert resumed[0]["dropped_resume"] == rows[-1]["held_decisions"]
    assert all(row["dropped_resume"] == 0 for row in resumed[1:])
    assert all(row["dropped_unfinished"] == 0 for row in resumed)
    assert resumed[0]["update"] > rows[-1]["update"]


def test_a_run_whose_groups_all_agree_ends_by_its_budget(one: topo.Topology, tmp_path: Path):
    # Every episode ends alike, so dynamic sampling waits for contrast that never comes.
    suite = CounterSuite(lengths=(2,))
    objective = partial(GRPO, dynamic_sampling=True)
    run = make_run(tmp_path, one, updates=100, suite=suite, env_steps=80)
    train(run, **arguments(objective, group_size=2))
    assert rows_of(tmp_path) == []
    assert run.counters["env_steps"] >= 80
    assert run.counters["version"] == 0
    assert len(json.loads((tmp_path / "eval.json").read_text())["history"]) == 2
    assert run.checkpoints.latest() is not None


def test_the_penalty_starts_at_zero(one: topo.Topology, tmp_path: Path):
    objective = partial(GRPO, kl_weight=0.1, kl_kind="k3")
    given = arguments(objective, group_size=2)
    train(make_run(tmp_path, one, updates=8), **given)
    rows = rows_of(tmp_path)
    assert rows[0]["loss_kl"] < rows[-1]["loss_kl"]
    assert 0 <= rows[0]["loss_kl"] < 1e-3


def ranks_main(folder: Path) -> None:
    ranks = topo.start("cpu")
    # Rank 1 has fewer simulators, so that its groups become complete later.
    actors = ActorSettings(1, 6 - 4 * ranks.rank, 3, 30.0, 2)
    given = arguments(GRPO, group_size=2, actors=actors)
    run = make_run(folder, ranks, updates=16)
    train(run, **given)
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(run.counters))
    ranks.stop()


@pytest.mark.slow
def test_ranks_with_unequal_trajectories_take_the_same_updates(tmp_path: Path):
    torchrun(__file__, tmp_path)
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert first == second
    rows = rows_of(tmp_path)
    assert rows[-1]["update"] >= 16
    for row in rows:
        assert row["valid_fraction"] <= 1
        assert math.isfinite(row["loss_policy"])
        assert row["ratio_gap"] is None or row["ratio_gap"] < 1e-5
    # the smaller rank's rows were filled up with rows that are no data
    assert min(row["valid_fraction"] for row in rows) < 1


if __name__ == "__main__":
    ranks_main(Path(sys.argv[1]))
