"""SAC and TD3+BC on a flow actor: who gets a gradient, what is cloned, which critics are built."""

import math

import pytest
import torch
from objectives.test_soft_actor_critic import ALL, SOME, A, F, H, make_batch, no_images

from torchrl_vla import schema
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic
from torchrl_vla.objectives.td3_bc import TD3BC
from torchrl_vla.policies import pi0, tiny, vlm
from torchrl_vla.policies.flow import FlowHead, FlowSchedule
from torchrl_vla.policies.flow_policy import FlowActor
from torchrl_vla.policies.heads import QHead
from torchrl_vla.policies.prefix import PrefixQHead

META = TabletopSuite().meta
COMMON = {"gamma": 0.9, "critic_only_updates": 0, "actor_interval": 1}


def actor() -> FlowActor:
    torch.manual_seed(0)
    return FlowActor(FlowHead(F, H, A, hidden=16), FlowSchedule(3, 0.5))


def heads() -> list[QHead]:
    torch.manual_seed(1)
    return [QHead(F, H, A, hidden=16, bottleneck=8) for _ in range(2)]


GOALS = {
    "sac": lambda **s: SoftActorCritic(actor(), heads(), no_images, **(COMMON | s)),
    "td3_bc": lambda **s: TD3BC(actor(), heads(), no_images, **(COMMON | s)),
}


@pytest.mark.parametrize("kind", GOALS)
def test_all_terms_are_there_and_gradients_stay_where_they_belong(kind: str):
    goal, batch = GOALS[kind](), make_batch(SOME)
    out = goal(batch, goal.counts(batch))
    assert {"loss_critic", "loss_actor", "loss_cloning"} <= set(out)
    assert all(math.isfinite(float(value)) for value in out.values())
    (out["loss_actor"] + out["loss_cloning"]).backward()
    assert all(p.grad is None for p in goal.critic_parameters)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in goal.actor_parameters)


@pytest.mark.parametrize("kind", GOALS)
def test_q_alone_moves_the_actor_through_all_steps(kind: str):
    goal, batch = GOALS[kind](), make_batch(ALL)
    goal(batch, goal.counts(batch))["loss_actor"].backward()
    assert goal.actor.head.net[-1].weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", GOALS)
def test_flow_matching_of_executed_demonstrated_numbers_is_cloned(kind: str):
    weight = {"cloning_weight": 1.0} if kind == "sac" else {}
    goal = GOALS[kind](cloned_rows="demonstrations", **weight)
    goal.actor.cloning_error = lambda rows, chunk: torch.arange(6.0)[:, None, None].expand(6, H, A)
    batch = make_batch([4, 2, 4, 4, 4, 4])
    out = goal(batch, goal.counts(batch))
    # rows 0 and 1 are demonstrations with 4 and 2 executed steps: (0 x 4 + 1 x 2) / 6
    assert float(out["loss_cloning"]) == pytest.approx(2 / 6)


def test_entropy_per_executed_number():
    goal, batch = (
        GOALS["sac"](entropy_unit="executed_number", target_entropy=-2.0),
        make_batch(SOME),
    )
    assert goal(batch, goal.counts(batch))["loss_alpha"].isfinite()


def test_the_target_actor_follows():
    goal = GOALS["td3_bc"](tau=0.5)
    with torch.no_grad():
        for p in goal.actor_parameters:
            p.add_(1.0)
    before = goal.target_actor.head.net[-1].weight.clone()
    goal.after_step()
    moved = goal.target_actor.head.net[-1].weight - before
    torch.testing.assert_close(moved, torch.full_like(moved, 0.5))


POLICIES = {
    "tiny gaussian": (lambda: tiny.make_policy(META, head="gaussian", weights=None), QHead),
    "vlm flow": (lambda: vlm.make_policy(META, size="tiny", head="flow"), QHead),
    "pi0": (lambda: pi0.make_policy(META, size="tiny", store_log_probs=False), PrefixQHead),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_builds_the_critics_of_its_features(name: str):
    make, kind = POLICIES[name]
    policy = make()
    critics = policy.make_critics(3)
    assert [type(critic) for critic in critics] == [kind] * 3
    features = torch.randn(2, policy.model.model.feature_dim)
    chunk = torch.rand(2, 4, META.action_dim)
    values = [critic(features, chunk) for critic in critics]
    assert all(value.shape == (2, 1) for value in values)
    assert not torch.equal(values[0], values[1])  # each with its own initialisation


def test_a_policy_without_a_continuous_actor_has_none():
    assert not hasattr(tiny.make_policy(META, weights=None), "make_critics")
    assert schema.CHUNK in pi0.make_policy(META, size="tiny").out_keys
