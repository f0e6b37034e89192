"""Minibatches, the early stop, and which parameters get which learning rate."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from envs.counter import META
from small import GRPO, POLICY, PPO
from tensordict import TensorDict

from torchrl_vla import topology as topo
from torchrl_vla.loops.updates import (
    UpdateSettings,
    frozen_copy,
    make_learner,
    minibatches,
    update_epochs,
)
from torchrl_vla.policies.deferred import place

SETTINGS = {"minibatch_size": 4, "epochs": 3, "lr": 1e-3, "max_grad_norm": 1.0}


def rows(number: int) -> TensorDict:
    return TensorDict({"x": torch.arange(number).view(2, -1)}, batch_size=[2, number // 2])


def test_every_decision_comes_once_per_epoch():
    generator = torch.Generator().manual_seed(0)
    parts = [part["x"].tolist() for part in minibatches(rows(10), 4, 2, generator)]
    assert [len(part) for part in parts] == [4, 4, 2] * 2
    for epoch in (parts[:3], parts[3:]):
        assert sorted(x for part in epoch for x in part) == list(range(10))
    assert parts[:3] != parts[3:]


@dataclass
class Drifting:
    """A learner whose approximate KL grows by 0.01 with every update."""

    updates: int = 0
    topology: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(world_size=1))

    def __post_init__(self):
        self.objective = SimpleNamespace(finish=dict, pop_gap=lambda: self.updates / 8)

    def update(self, minibatch):
        self.updates += 1
        return {"approx_kl": 0.01 * self.updates, "loss_policy": float(len(minibatch))}


def test_target_kl_ends_the_round():
    generator = torch.Generator().manual_seed(0)
    learner = Drifting()
    report = update_epochs(learner, rows(8), UpdateSettings(**SETTINGS), generator)
    assert (learner.updates, report["target_kl_stops"]) == (6, 0.0)
    assert report["approx_kl"] == pytest.approx(0.035)
    assert report["ratio_gap"] == 1 / 8  # looked at after the first update only
    learner = Drifting()
    settings = UpdateSettings(**SETTINGS, target_kl=0.025)
    report = update_epochs(learner, rows(8), settings, generator)
    # 0.01, 0.02, 0.03: the third is too far
    assert (learner.updates, report["target_kl_stops"]) == (3, 1.0)
    assert report["approx_kl"] == pytest.approx(0.02)


def test_a_round_without_newest_decisions_has_no_gap():
    learner = Drifting()
    learner.objective.pop_gap = lambda: math.nan
    report = update_epochs(
        learner, rows(8), UpdateSettings(**SETTINGS), torch.Generator().manual_seed(0)
    )
    assert math.isnan(report["ratio_gap"])


def build(policy, objective, ranks, **rates):
    settings = UpdateSettings(**SETTINGS | rates)
    given = {"gamma": 1.0, "group_size": 1 if objective is PPO else 2}
    return make_learner(ranks, policy, objective, settings, **given)


def test_groups_of_parameters(one: topo.Topology):
    learner, goal = build(POLICY(META), PPO, one, value_lr=5e-3)
    assert {g.name: g.lr for g in learner.groups} == {"policy": 1e-3, "value": 5e-3}
    assert goal.uses_value
    policy = POLICY(META)
    learner, _ = build(policy, GRPO, one)
    assert [g.name for g in learner.groups] == ["policy"]
    frozen = {n for n, p in policy.named_parameters() if not p.requires_grad}
    assert any("value_head" in name for name in frozen)
    policy = POLICY(META, head="gaussian", store_log_probs=True)
    learner, _ = build(policy, PPO, one, value_lr=5e-3, head_lr=2e-3)
    assert {g.name: g.lr for g in learner.groups} == {"policy": 1e-3, "head": 2e-3, "value": 5e-3}
    # every trainable parameter once
    given = [id(p) for group in learner.groups for p in group.params]
    assert sorted(given) == sorted(id(p) for p in policy.parameters() if p.requires_grad)
    assert not any("token_head" in n for n, p in policy.named_parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("head", "objective", "rates", "message"),
    [
        ("tokens", PPO, {}, "updates.value_lr is missing"),
        ("tokens", GRPO, {"value_lr": 1e-3}, "updates.value_lr=0.001 has no use: the objective"),
        ("tokens", PPO, {"value_lr": 1e-3, "head_lr": 1e-3}, "head_lr=0.001 has no use: TokenPol"),
        ("gaussian", PPO, {"value_lr": 1e-3}, "updates.head_lr is missing"),
        ("tokens", PPO, {"value_lr": 1e-3, "target_kl": 0.0}, "updates.target_kl is 0.0"),
        ("tokens", PPO, {"minibatch_size": 0}, "updates.minibatch_size is 0"),
    ],
)
def test_learning_rates_without_use_are_refused(head, objective, rates, message, one):
    policy = POLICY(META, head=head, store_log_probs=head == "gaussian")
    with pytest.raises(ValueError, match=message):
        build(policy, objective, one, **rates)


def test_a_frozen_copy_stays(one: topo.Topology):
    policy = POLICY(META)
    place(policy, one)
    copy = frozen_copy(policy, lambda: POLICY(META), one)
    before = {n: p.full_tensor().clone() for n, p in copy.model.model.named_parameters()}
    for name, p in policy.model.model.named_parameters():
        assert torch.equal(before[name], p.full_tensor())
        p.data += 1.0
    for name, p in copy.model.model.named_parameters():
        assert torch.equal(p.full_tensor(), before[name])
        assert not p.requires_grad
