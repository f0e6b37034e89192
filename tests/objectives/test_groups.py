"""Group baselines (GRPO, RLOO), contrast and trajectory weights, worked by hand."""

import pytest
import torch

from torchrl_vla.objectives.groups import (
    group_relative,
    has_contrast,
    leave_one_out,
    one_per_trajectory,
    trajectory_return,
    trajectory_weight,
)


def column(*numbers):
    return torch.tensor(numbers).view(-1, 1)


# Group 7: returns 1, 0, 0, 1 (interleaved with the others); group -3: all 0; group 9: one member.
RETURNS = column(1.0, 0.0, 0.0, 5.0, 0.0, 0.0, 1.0)
GROUP = column(7, -3, 7, 9, 7, -3, 7)
ALL = torch.ones(7, 1, dtype=torch.bool)


def close(actual, *expected):
    assert actual.shape[-1] == 1
    assert torch.allclose(actual.flatten(), torch.tensor(expected), atol=1e-5), actual.flatten()


def test_group_relative():
    # Group 7: mean .5, population std .5.
    close(
        group_relative(RETURNS, GROUP, ALL, divide_by_std=True), 1.0, 0.0, -1.0, 0.0, -1.0, 0.0, 1.0
    )
    close(
        group_relative(RETURNS, GROUP, ALL, divide_by_std=False),
        *(0.5, 0.0, -0.5, 0.0, -0.5, 0.0, 0.5),
    )


def test_leave_one_out():
    # Others of a 1: (0+0+1)/3 = 1/3 -> 2/3; others of a 0: (1+0+1)/3 = 2/3 -> -2/3.
    third = 2 / 3
    close(leave_one_out(RETURNS, GROUP, ALL), third, 0.0, -third, 0.0, -third, 0.0, third)


def test_uncounted_entries_do_not_move_the_baseline():
    # Without the last 1, group 7 counts 1, 0, 0: mean 1/3. The uncounted entry still gets a value.
    counted = ALL.clone()
    counted[6] = False
    out = group_relative(RETURNS, GROUP, counted, divide_by_std=False)
    close(out, 2 / 3, 0.0, -1 / 3, 0.0, -1 / 3, 0.0, 2 / 3)
    nothing = group_relative(RETURNS, GROUP, ~ALL, divide_by_std=True)
    close(nothing, *[0.0] * 7)


def test_contrast():
    # Only group 7 holds two different returns; a constant 0.1 is no contrast in spite of rounding.
    assert has_contrast(RETURNS, GROUP, ALL).flatten().tolist() == [1, 0, 1, 0, 1, 0, 1]
    same = torch.full((8, 1), 0.1)
    assert not bool(has_contrast(same, torch.zeros(8, 1, dtype=torch.long), same > 0).any())
    close(
        group_relative(same, torch.zeros(8, 1, dtype=torch.long), same > 0, divide_by_std=True),
        *[0.0] * 8,
    )


# Rollout [2, 4]: episode 5 has 3 decisions, 8 has 1, 2 has 4 of which the last is not data.
EPISODE = torch.tensor([[5, 5, 5, 8], [2, 2, 2, 2]]).unsqueeze(-1)
VALID = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]).bool().unsqueeze(-1)
REWARD = torch.tensor([[0.0, 0.5, 1.0, 2.0], [0.0, 0.0, 0.0, 99.0]]).unsqueeze(-1)


def test_trajectory_sums():
    close(trajectory_return(REWARD, EPISODE, VALID), 1.5, 1.5, 1.5, 2.0, 0.0, 0.0, 0.0, 0.0)
    chosen = one_per_trajectory(EPISODE, VALID)
    assert chosen.flatten().tolist() == [1, 0, 0, 1, 1, 0, 0, 0]


def test_baseline_counts_trajectories_not_decisions():
    # One group: returns 1.5, 2, 0 -> mean 7/6. Counting decisions it would be (4.5 + 2)/7 = .93.
    returns = trajectory_return(REWARD, EPISODE, VALID)
    group = torch.zeros_like(EPISODE)
    out = group_relative(returns, group, one_per_trajectory(EPISODE, VALID), divide_by_std=False)
    assert out[0, 0, 0].item() == pytest.approx(1.5 - 7 / 6)
    assert out[0, 3, 0].item() == pytest.approx(2 - 7 / 6)


def test_trajectory_weights():
    third = 1 / 3
    close(trajectory_weight(EPISODE, VALID), third, third, third, 1.0, third, third, third, 0.0)
    # By numbers: sizes 2, 2, 4 -> 1/8 for each number of episode 5.
    size = torch.tensor([[2, 2, 4, 6], [0, 0, 0, 9]]).unsqueeze(-1)
    out = trajectory_weight(EPISODE, VALID, size)
    close(out, 0.125, 0.125, 0.125, 1 / 6, 0.0, 0.0, 0.0, 0.0)


def test_bad_ids_and_shapes():
    with pytest.raises(TypeError, match="named by integers"):
        group_relative(RETURNS, RETURNS, ALL, divide_by_std=True)
    with pytest.raises(ValueError, match="shapes differ"):
        leave_one_out(RETURNS.flatten(), GROUP, ALL)
