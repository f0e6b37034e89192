"""The off-policy loop: pace, counts, the evaluated average, resume, settings that are refused."""

import json
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from small import POLICY, SUITE, make_run
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla import topology as topo
from torchrl_vla.actors import ActorSettings, load_full_weights
from torchrl_vla.loops.actor_critic import UpdateSettings
from torchrl_vla.loops.intake import Recent, drain
from torchrl_vla.loops.off_policy import ReplaySettings, train
from torchrl_vla.loops.pacing import Pacer, PaceSettings
from torchrl_vla.loops.plans import CheckpointPlan
from torchrl_vla.metrics import Stopwatch, read_metrics
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic
from torchrl_vla.objectives.td3_bc import TD3BC
from torchrl_vla.policies.shard import full_weights

SAC = partial(SoftActorCritic, cloning_weight=0.0, cloned_rows=None, critic_only_updates=4)


def pacer(**settings) -> Pacer:
    given = {"updates_per_decision": 0.5, "slack_decisions": 16, "publish_updates": 1}
    return Pacer(PaceSettings(**(given | settings)), batch=8, min_decisions=32)


def test_updates_follow_decisions():
    pace = pacer()
    pace.decisions = 31
    assert not pace.may_update()
    pace.decisions = 40  # 8 beyond the first 32: 0.5 x 8 = 4 updates
    done = 0
    while pace.may_update():
        pace.updates += 1
        done += 1
    assert done == 4


def test_the_warm_up_comes_on_the_first_decisions():
    pace = pacer(warm_up_updates=10)
    pace.decisions = 32
    while pace.may_update():
        pace.updates += 1
    assert pace.updates == 10


def test_actors_run_ahead_by_the_slack_and_no_more():
    pace = pacer()
    pace.updates, pace.decisions = 4, 40  # used: 32 + 4 / 0.5 = 40
    # one more batch of 8 while fewer than 40 + 16 decisions are there or pending
    assert [pace.may_request(pending) for pending in (0, 1, 2, 3)] == [True, True, False, False]


def test_every_worker_has_a_batch_to_collect():
    settings = PaceSettings(0.5, slack_decisions=48, publish_updates=1)
    settings.check(workers=2, batch=24)
    pace = Pacer(settings, batch=24, min_decisions=32, decisions=32)
    assert [pace.may_request(pending) for pending in (0, 1, 2)] == [True, True, False]
    said = r"slack_decisions is 48, but 3 workers collect 72 decisions .*set it to 72 or more"
    with pytest.raises(ValueError, match=said):
        settings.check(workers=3, batch=24)


def test_workers_that_would_be_idle_are_refused_before_they_start(one, tmp_path: Path):
    settings = small_settings(actors=ActorSettings(3, 4, 3))
    with pytest.raises(ValueError, match=r"pace\.slack_decisions is 24, but 3 workers collect 36"):
        train(make_run(tmp_path, one, updates=2), **settings)
    assert not (tmp_path / "actors").exists()


def test_a_row_has_the_means_of_its_updates(one, tmp_path: Path):
    # The actor's learning rate is 0.01/8 up to update 4, then 2/8, 3/8, ... of 0.01.
    settings = small_settings(updates=UpdateSettings(1e-2, 1e-3, 1e-3, 1.0, actor_warm_up=8))
    train(make_run(tmp_path, one, updates=10), **settings)
    rates = [row["lr/actor"] for row in read_metrics(tmp_path) if row["update"]]
    assert rates == pytest.approx([1e-2 * eighths / 8 for eighths in (1, 1, 1.5, 3.5, 5.5)])


class Draws:
    """Rows arrive when they are asked for; the rule allows none before the third batch."""

    pending, batches = 0, 0

    def request(self):
        self.pending += 1

    def receive(self, wait=True):
        if not wait:
            return None
        self.pending -= 1
        self.batches += 1
        return True

    def absorb(self):
        return None

    def can_draw(self, version):
        return self.batches >= 3


def test_the_learner_waits_while_the_sampling_rule_allows_nothing():
    # Enough decisions for an update, none requested by the pace: it must ask for more by itself.
    both, ready = Draws(), pacer()
    ready.decisions, ready.min_decisions = 10_000, 1
    drain(both, both, Recent(deque()), ready, Stopwatch(), version=0)
    assert (both.batches, both.pending) == (3, 0)


def test_recent_counts():
    rows = TensorDict(batch_size=[3])
    rows[schema.NUM_EXECUTED] = torch.tensor([[2], [1], [2]])
    rows[schema.DONE] = torch.tensor([[False], [True], [True]])
    rows[schema.SUCCESS] = torch.tensor([[False], [True], [False]])
    recent = Recent(deque(maxlen=200))
    recent.add(rows)
    assert recent.pop() == (5, 3, 2)
    assert recent.pop() == (0, 0, 0)
    assert recent.metrics() == {"train/success_rate": 0.5}


def test_outcomes_count_once_every_first_episode_can_have_ended():
    # 4 simulators whose episodes take up to 2 decisions: 8 decisions. Those that end within them
    # are the short ones, and all of these succeed.
    short = TensorDict({schema.NUM_EXECUTED: torch.ones(4, 1)}, [4])
    short[schema.DONE] = torch.tensor([[True], [False], [False], [False]])
    short[schema.SUCCESS] = short[schema.DONE].clone()
    failed = short.clone()
    failed[schema.SUCCESS] = torch.zeros(4, 1, dtype=torch.bool)
    recent = Recent(deque(), left_out=8)
    for rows in (short, short, failed):
        recent.add(rows)
    assert recent.pop() == (12, 12, 3)
    assert recent.metrics() == {"train/success_rate": 0.0}


def small_settings(**changes) -> dict:
    given = {
        "make_policy": partial(POLICY, head="gaussian"),
        "objective": SAC,
        "actors": ActorSettings(1, 4, 3, 30.0),
        "replay": ReplaySettings(batch_size=8, capacity=200, min_decisions=24),
        "pace": PaceSettings(0.5, 24, 2, average_share=0.25, warm_up_updates=4),
        "updates": UpdateSettings(1e-2, 1e-3, 1e-3, 1.0),
        "seed": 0,
        "gamma": 0.9,
        "resume": False,
    }
    return given | changes


def test_the_average_is_evaluated_and_the_live_weights_never_see_it():
    torch.manual_seed(0)
    live, average = (POLICY(SUITE.meta, head="gaussian") for _ in range(2))
    start = full_weights(average)
    before = full_weights(live)
    load_full_weights(average, before, 0.25)
    key = ("actor", "module", "0", "module", "net", "0", "weight")
    wanted = 0.75 * start[key] + 0.25 * before[key]
    torch.testing.assert_close(full_weights(average)[key], wanted)
    assert (full_weights(live) == before).all()


@pytest.mark.parametrize(
    "objective", [SAC, pytest.param(partial(TD3BC, critic_only_updates=4), marks=pytest.mark.slow)]
)
def test_a_run_goes_on_where_it_stopped(one: topo.Topology, tmp_path: Path, objective):
    alpha_lr = 1e-3 if objective is SAC else None
    settings = small_settings(
        objective=objective, updates=UpdateSettings(1e-2, 1e-3, alpha_lr, 1.0)
    )
    if objective is not SAC:  # packed pictures on another disk
        (tmp_path / "disk").mkdir()
        place = {"folder": str(tmp_path / "disk"), "compress_to": 0.9}
        settings["replay"] = replace(settings["replay"], **place)
    saves = CheckpointPlan(None, every_updates=4, asynchronous=objective is SAC)
    train(make_run(tmp_path, one, updates=10, run={"saves": saves}), **settings)
    assert sorted(path.name[-2:] for path in (tmp_path / "checkpoints").iterdir()) == [
        "04",
        "08",
        "10",
    ]
    first = [row for row in read_metrics(tmp_path) if row["update"]][-1]
    train(make_run(tmp_path, one, updates=40), **(settings | {"resume": True}))
    rows = [row for row in read_metrics(tmp_path) if row["update"]]
    assert [row["update"] for row in rows] == list(range(2, 41, 2))
    assert rows[-1]["decisions"] > first["decisions"]
    assert rows[-1]["version"] == 20
    for row in rows:
        # every row that was counted is still there: no second wait for the first decisions, and no
        # second burst of updates on them
        assert row["replay/rows"] == min(row["decisions"], 200)
        assert row["update"] <= 4 + 0.5 * (row["decisions"] - 24)
    # the policy of the newest decision may be a few publishes old, never from the future
    assert all(row["policy_lag"] >= 0 for row in rows)
    evaluation = json.loads((tmp_path / "eval.json").read_text())
    assert [entry["update"] for entry in evaluation["history"]] == [0, 10, 40]
    assert (tmp_path / "replay" / "rank-0").is_symlink() == (objective is not SAC)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pacer(slack_decisions=0), "slack_decisions is 0"),
        (lambda: pacer(average_share=0.0), r"average_share is 0\.0; it must be in \(0, 1\]"),
        (lambda: pacer(average_share=1.1), "average_share is 1.1"),
        (lambda: pacer(warm_up_updates=-5), "warm_up_updates is -5"),
        (
            lambda: ReplaySettings(batch_size=8, capacity=9, min_decisions=0),
            "min_decisions is 0; it must be at least 1",
        ),
        (
            lambda: ReplaySettings(
                batch_size=8, capacity=9, min_decisions=1, demonstration_share=0.5
            ),
            "demonstration_episodes is 0 with a share of 0.5",
        ),
        (
            lambda: ReplaySettings(
                batch_size=8, capacity=9, min_decisions=1, demonstration_episodes=3
            ),
            "demonstration_episodes is 3 with a share of 0.0",
        ),
        (lambda: UpdateSettings(1e-3, 1e-3, 1e-3, 0.0), "max_grad_norm is 0.0"),
        (lambda: UpdateSettings(1e-3, 1e-3, 0.0, 1.0), r"updates\.alpha_lr is 0\.0"),
        (
            lambda: UpdateSettings(1e-3, 1e-3, None, 1.0, recompute=True),
            r"updates\.recompute=True and offload=False need a trained trunk",
        ),
    ],
)
def test_settings_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_option_of_another_algorithm_is_refused(one: topo.Topology, tmp_path: Path):
    with pytest.raises(ValueError, match=r"updates\.alpha_lr is 0\.001, but TD3BC has 0 entropy"):
        train(make_run(tmp_path, one, updates=2), **small_settings(objective=TD3BC))
    given = small_settings(objective=partial(TD3BC, alpha=0.1))
    with pytest.raises(TypeError, match="alpha"):
        train(make_run(tmp_path / "b", one, updates=2), **given)
