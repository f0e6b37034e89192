"""A learner on another device than its data: nothing that an update computes is on two of them."""

from types import SimpleNamespace

import fsdp_cases
import pytest
import torch
from other_device import OTHER, OnOther, here, other_device
from small_checkpoints import META, observations
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.objectives.credit import Gae
from torchrl_vla.objectives.policy_gradient import PolicyGradient, score
from torchrl_vla.policies import deferred, openvla, pi0, tiny, vlm

POLICIES = {
    "tiny": lambda: tiny.make_policy(META, weights=None),
    "openvla": lambda: openvla.make_policy(META, size="tiny", chunk_size=4),
    "pi0": lambda: pi0.make_policy(META, size="tiny", steps=2),
    "vlm": lambda: vlm.make_policy(META, size="tiny"),
    "vlm gaussian": lambda: vlm.make_policy(META, size="tiny", head="gaussian"),
    "vlm flow": lambda: vlm.make_policy(META, size="tiny", head="flow", steps=2),
}


def test_the_other_device_refuses_what_a_gpu_refuses():
    with other_device():
        one, two = torch.ones(2, 2, device=OTHER), torch.ones(2, 2)
        assert isinstance(one, OnOther)
        for mixed in (
            lambda: one + two,
            lambda: one @ two,
            lambda: torch.cat([one, two]),
            lambda: torch.stack([one.sum(), two.sum()]),
            lambda: torch.where(two > 0, one, 0),
            lambda: two[one > 0],
            lambda: torch.nn.functional.linear(two, one),
            lambda: two.add_(one),
        ):
            with pytest.raises((RuntimeError, TypeError)):
                mixed()
        both = one + two.to(OTHER) + two.sum() + one[two > 0].sum()
        assert isinstance(both, OnOther)
        assert not isinstance(both.cpu(), OnOther)
        assert both.tolist() == [[10.0, 10.0]] * 2
        two.copy_(both)
        assert float(two.sum()) == 40


def ranks_on(device: torch.device) -> SimpleNamespace:
    """One of two ranks whose twin does what it does, so that sums over ranks are computed."""
    return SimpleNamespace(
        world_size=2, rank=0, mesh=None, device=device, all_reduce_sum=lambda x: 2 * x.detach()
    )


def learn(case: str, device: torch.device) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Take one update; return its report and the weights after it."""
    _, learner, batches = fsdp_cases.build(case, ranks_on(device))
    torch.manual_seed(1)
    report = learner.update(batches[0])
    named = {f"{g.name}.{n}": p for g in learner.groups for n, p in enumerate(g.params)}
    return report, {name: here(p).detach() for name, p in named.items()}


@pytest.mark.parametrize("case", fsdp_cases.CASES)
def test_an_update_on_another_device_is_the_same_update(case: str, monkeypatch):
    wanted, weights = learn(case, torch.device("cpu"))
    # torch knows no fused kernel for the name of the other device
    plain = torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *a, fused, **k: plain(*a, foreach=False, **k))
    with other_device():
        found, moved = learn(case, OTHER)
    assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert moved.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(moved[name], value, atol=1e-5, rtol=1e-4)


def judged(name: str, device: torch.device) -> tuple[TensorDict, TensorDict]:
    """Act, and judge a round that lies on the host, by a policy on ``device``."""
    torch.manual_seed(0)
    policy = POLICIES[name]()
    deferred.place(policy, ranks_on(device), sharded=False)
    torch.manual_seed(1)
    host = observations(2, 3)
    acted = policy(host.to(device))
    rollout = host.clone()
    for key in (policy.action_key, schema.CHUNK, schema.LOG_PROBS, "state_value"):
        rollout[key] = acted[key].detach().cpu()
    rollout["next"] = observations(2, 3, seed=1)
    rollout["next", schema.TASK_ID] = host[schema.TASK_ID]
    no = torch.zeros(2, 3, 1, dtype=torch.bool)
    rollout[schema.TERMINATED] = rollout[schema.SIM_ERROR] = no
    rollout[schema.DONE] = rollout[schema.TRUNCATED] = no.clone()
    rollout[schema.EPISODE_ID] = torch.arange(2).view(2, 1, 1).expand(2, 3, 1).clone()
    rollout[schema.EXECUTED_MASK] = torch.ones(2, 3, 4, dtype=torch.bool)
    rollout[schema.NUM_EXECUTED] = torch.full((2, 3, 1), 4)
    rollout[schema.REWARD] = torch.rand(2, 3, 1)
    rollout[schema.POLICY_VERSION] = torch.zeros(2, 3, 1, dtype=torch.int64)
    goal = PolicyGradient(policy, advantage=Gae(), gamma=0.9, value_weight=0.5, behaviour_cap=2.0)
    rows, _ = goal.credit(rollout, 0)
    rows = rows.reshape(-1)
    return rows, score(policy, rows)[0]


@pytest.mark.parametrize("name", POLICIES)
def test_a_round_on_the_host_is_judged_by_a_policy_on_another_device(name: str):
    wanted, scored = judged(name, torch.device("cpu"))
    with other_device():
        found, again = judged(name, OTHER)
    assert not any(isinstance(leaf, OnOther) for leaf in found.values(True, True))
    for key in ("advantage", "value_target", "proximal_log_probs", schema.CHUNK):
        torch.testing.assert_close(found[key], wanted[key], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(again, scored, atol=1e-5, rtol=1e-4)
