"""Estimators on rounds, worked by hand: the keys they read and the numbers they give."""

import math

import pytest
import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.objectives.credit import (
    COUNTED,
    NEXT_VALUE,
    PROXIMAL,
    VALID,
    VALUE,
    Gae,
    GroupRelative,
    LeaveOneOut,
    ReinforcePlusPlus,
    VTrace,
)


def line(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype).view(1, -1, 1)


def rows(reward, done, *, episode=None, group=None, steps=2) -> TensorDict:
    """Return ``[1, T]`` decisions of ``steps`` control steps each, one number per step."""
    number = len(reward)
    td = TensorDict(batch_size=[1, number])
    td[schema.REWARD] = line(reward)
    td[schema.DONE] = td[schema.TERMINATED] = line(done, torch.bool)
    td[schema.EPISODE_ID] = line(episode or [0] * number, torch.int64)
    td[schema.GROUP_ID] = line(group or [0] * number, torch.int64)
    td[schema.NUM_EXECUTED] = torch.full((1, number, 1), steps)
    td[schema.EXECUTED_MASK] = torch.ones(1, number, steps, dtype=torch.bool)
    td[COUNTED] = td[VALID] = torch.ones(1, number, 1, dtype=torch.bool)
    return td


def close(actual: torch.Tensor, expected: list[float]) -> None:
    assert torch.allclose(actual.flatten(), torch.tensor(expected).float(), atol=1e-5), (
        actual.flatten()
    )


def test_gae_discounts_by_executed_steps_and_normalises():
    # gamma 0.5 per step, 2 steps: 0.25 per decision, lambda 1/2, values 1, next values 1 and 0.
    # delta_1 = 2 - 1 = 1; delta_0 = 0 + 0.25 * 1 - 1 = -0.75; A_0 = -0.75 + 0.125 * 1 = -0.625.
    # targets A + V = 0.375, 2. mean 0.1875, deviation 0.8125: normalised -1, 1.
    td = rows([0.0, 2.0], [False, True])
    td[VALUE], td[NEXT_VALUE] = line([1.0, 1.0]), line([1.0, 0.0])
    advantage, target = Gae(lmbda=0.5)(td, 0.5)
    close(target, [0.375, 2.0])
    close(advantage, [-1.0, 1.0])


def test_gae_leaves_invalid_decisions_out():
    # The same row with a stale decision in front: it gets 0 and nothing leaks into it.
    td = rows([9.0, 0.0, 2.0], [False, False, True])
    td[VALUE], td[NEXT_VALUE] = line([5.0, 1.0, 1.0]), line([1.0, 1.0, 0.0])
    td[VALID] = line([False, True, True], torch.bool)
    advantage, target = Gae(lmbda=0.5)(td, 0.5)
    close(target, [0.0, 0.375, 2.0])
    close(advantage, [0.0, -1.0, 1.0])


def test_vtrace_weighs_by_start_over_behaviour_of_the_stored_action():
    # One decision of two steps, both executed: log-ratio ln 2 + ln 2 = ln 4; rho = min(4, 1) = 1.
    # Then only one step executed: ln 2, with rho_clip 3 rho = 2.
    # reward 1, V = 0.25, terminal: delta = 0.75; target = V + rho delta; advantage = rho (1 - V).
    td = rows([1.0], [True])
    td[VALUE], td[NEXT_VALUE] = line([0.25]), line([7.0])
    td[schema.LOG_PROBS] = torch.full((1, 1, 2, 1), -2.0)
    td[PROXIMAL] = td[schema.LOG_PROBS] + math.log(2)
    _, target = VTrace()(td, 1.0)
    close(target, [1.0])
    td[schema.EXECUTED_MASK] = torch.tensor([[[True, False]]])
    _, target = VTrace(rho_clip=3.0)(td, 1.0)
    close(target, [0.25 + 2 * 0.75])
    # equal policies: the one-step target whatever the caps
    td[PROXIMAL] = td[schema.LOG_PROBS].clone()
    _, target = VTrace(rho_clip=3.0)(td, 1.0)
    close(target, [1.0])


def test_vtrace_advantages_are_normalised_over_two_decisions():
    # Both terminal: rho 1, V 0, rewards 0 and 2: advantages 0, 2 -> -1, 1.
    td = rows([0.0, 2.0], [True, True])
    td[VALUE] = td[NEXT_VALUE] = line([0.0, 0.0])
    td[schema.LOG_PROBS] = td[PROXIMAL] = torch.full((1, 2, 2, 1), -2.0)
    advantage, _ = VTrace()(td, 1.0)
    close(advantage, [-1.0, 1.0])


# Two groups of two. Group 7: returns 1 (two decisions) and 0; group 8: returns 1 and 1.
GROUPS = {
    "reward": [0.0, 1.0, 0.0, 1.0, 1.0],
    "done": [False, True, True, True, True],
    "episode": [0, 0, 1, 2, 3],
    "group": [7, 7, 7, 8, 8],
}


def test_group_relative_counts_a_trajectory_once():
    # mean of group 7 is 0.5 (not 2/3, which three decisions would give); deviation +-0.5.
    close(GroupRelative(divide_by_std=False)(rows(**GROUPS), 1.0)[0], [0.5, 0.5, -0.5, 0, 0])
    # population standard deviation 0.5
    close(GroupRelative(divide_by_std=True)(rows(**GROUPS), 1.0)[0], [1, 1, -1, 0, 0])


def test_leave_one_out_compares_with_the_others():
    # the other of two: 1 - 0 = 1, 0 - 1 = -1; 1 - 1 = 0
    close(LeaveOneOut()(rows(**GROUPS), 1.0)[0], [1, 1, -1, 0, 0])


def test_padding_does_not_enter_a_baseline():
    more = {key: [*values, values[0]] for key, values in GROUPS.items()} | {
        "reward": [*GROUPS["reward"], 5.0]
    }
    td = rows(**more)
    td[COUNTED] = td[VALID] = line([True] * 5 + [False], torch.bool)
    close(GroupRelative(divide_by_std=False)(td, 1.0)[0][:, :5], [0.5, 0.5, -0.5, 0, 0])


def test_a_stale_decision_still_pays_its_reward():
    # The rewarded decision of episode 0 may be too old to train on; its reward is still a fact.
    td = rows(**GROUPS)
    td[VALID] = line([True, False, True, True, True], torch.bool)
    close(LeaveOneOut()(td, 1.0)[0], [1, 1, -1, 0, 0])


def test_reinforce_plus_plus_whitens_the_return_to_go():
    # gamma 0.5 per step, 2 steps: 0.25 per decision. Returns to go: 0.25, 1 | 0. mean 5/12.
    td = rows([0.0, 1.0, 0.0], [False, True, True], episode=[0, 0, 1])
    advantage, target = ReinforcePlusPlus()(td, 0.5)
    assert target is None
    returns = [0.25, 1.0, 0.0]
    mean = sum(returns) / 3
    spread = math.sqrt(sum((r - mean) ** 2 for r in returns) / 3)
    close(advantage, [(r - mean) / spread for r in returns])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gae(lmbda=1.5), "lmbda is 1.5"),
        (lambda: VTrace(rho_clip=0), "rho_clip=0"),
        (lambda: VTrace(c_clip=-1), "c_clip=-1"),
    ],
)
def test_settings_out_of_range(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
