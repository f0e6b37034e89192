"""Executed steps, valid decisions and transitions, against the faults of the reference trainer."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_vla.objectives.masks import (
    action_mask,
    decision_discount,
    decision_reward,
    executed_steps,
    response_mask,
    trajectories_to_transitions,
    valid_decisions,
)

T, H = 6, 4
PENALTY = 0.001


def flags(*steps):
    """One trajectory of flags [1, T, H], set at the given steps of the horizon."""
    out = torch.zeros(T * H, dtype=torch.bool)
    out[list(steps)] = True
    return out.view(1, T, H)


def transitions(terminated, truncated=None, gamma=1.0):
    """Each decision costs PENALTY, the first completing step pays 1; obs counts 10, 11, ... 16."""
    first = int(terminated.flatten().long().argmax())
    reward = torch.zeros(1, T, H)
    reward[..., 0] -= PENALTY
    if terminated.any():
        reward.view(-1)[first] += 1
    obs = TensorDict({"state": 10.0 + torch.arange(T + 1).view(1, T + 1, 1)}, [1, T + 1])
    act = TensorDict({"index": torch.arange(T).view(1, T, 1)}, [1, T])
    return trajectories_to_transitions(obs, act, reward, terminated, truncated, gamma=gamma)


def rows(td):
    """(decision, reward, terminated, truncated) per stored transition."""
    return [
        (int(i), pytest.approx(float(r), abs=1e-6), bool(a), bool(b))
        for i, r, a, b in zip(
            td["index"],
            td["next", "reward"],
            td["next", "terminated"],
            td["next", "truncated"],
            strict=True,
        )
    ]


def plain(n):
    return [(i, -PENALTY, False, False) for i in range(n)]


def test_success_in_the_middle_of_a_chunk():
    # Steps 0..10 of the horizon ran: chunk 2 (steps 8..11) completes at its third step.
    td = transitions(flags(*range(10, 24)))
    assert rows(td) == [*plain(2), (2, 0.999, True, False)]
    assert td["next", "executed_mask"][2].tolist() == [True, True, True, False]
    assert td["next", "num_executed"].flatten().tolist() == [4, 4, 3]


def test_success_at_the_first_step_of_a_chunk_is_kept():
    # Reference: chunk 2 counts as invalid, so only (0), (1) are stored: no reward, no terminal.
    td = transitions(flags(*range(8, 24)))
    assert rows(td) == [*plain(2), (2, 0.999, True, False)]
    assert td["next", "num_executed"].flatten().tolist() == [4, 4, 1]


def test_success_in_the_last_chunk_is_rewarded():
    # Reference: the last chunk is dropped and (4, -1, done) is written into the POSITIVE pool.
    td = transitions(flags(22, 23))
    assert rows(td) == [*plain(5), (5, 0.999, True, False)]


def test_time_out_is_truncated_and_keeps_the_observation_after_it():
    # Reference: (4, -1, done), a terminal without bootstrap; chunk 5 is dropped.
    td = transitions(flags())
    assert rows(td) == [*plain(5), (5, -PENALTY, False, True)]
    assert td["next", "done"].flatten().tolist() == [False] * 5 + [True]
    # Observation t is 10 + t; the one after the last decision is 16.
    assert td["state"].flatten().tolist() == [10, 11, 12, 13, 14, 15]
    assert td["next", "state"].flatten().tolist() == [11, 12, 13, 14, 15, 16]


def test_flickering_success_ends_the_episode_once():
    # Reference: chunk 2 dropped, chunk 3 kept, then (4, -1, done), all after the episode's end.
    td = transitions(flags(9))
    assert rows(td) == [*plain(2), (2, 0.999, True, False)]


def test_time_out_inside_a_chunk_and_both_flags():
    assert rows(transitions(flags(), flags(5)))[-1] == (1, -PENALTY, False, True)
    # Both on one step: terminated wins. A termination after the time-out did not happen.
    assert rows(transitions(flags(5), flags(5)))[-1] == (1, 0.999, True, False)
    assert rows(transitions(flags(6), flags(5)))[-1] == (1, -PENALTY, False, True)
    assert rows(transitions(flags(5), flags(6)))[-1] == (1, 0.999, True, False)


def test_ends_belong_to_their_own_trajectory():
    terminated = torch.cat([flags(9), flags(), flags(0)])
    obs = TensorDict({"episode_id": torch.arange(3).view(3, 1, 1).expand(3, T + 1, 1)}, [3, T + 1])
    act = TensorDict({}, [3, T])
    td = trajectories_to_transitions(obs, act, torch.zeros(3, T, H), terminated, gamma=0.9)
    assert td["episode_id"].flatten().tolist() == [0] * 3 + [1] * 6 + [2]
    assert td["next", "terminated"].flatten().nonzero().flatten().tolist() == [2, 9]
    assert td["next", "truncated"].flatten().nonzero().flatten().tolist() == [8]


def test_missing_final_observation_is_refused():
    obs, act = TensorDict({}, [1, T]), TensorDict({}, [1, T])
    with pytest.raises(ValueError, match="append the observation after the last decision"):
        trajectories_to_transitions(obs, act, torch.zeros(1, T, H), flags(), gamma=0.9)


def test_response_mask_includes_the_completing_step_only():
    # 2 chunks of 3 steps, completing at step 1 of chunk 1, 2 numbers per step.
    complete = torch.tensor([[[0, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]]]).bool()
    mask = response_mask(complete, 2)
    assert mask.shape == (2, 2, 3, 2)
    assert mask.flatten(-2)[0].int().tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert bool(mask[1].all())


def test_chunks_after_the_end_are_not_data():
    executed = executed_steps(flags(8))
    assert valid_decisions(executed).flatten().tolist() == [True, True, True, False, False, False]


def test_decision_discount_and_reward():
    # 0.99^8 = 0.922745; a decision of which nothing ran discounts nothing.
    out = decision_discount(torch.tensor([[8], [1], [0]]), 0.99)
    assert torch.allclose(out, torch.tensor([[0.9227447], [0.99], [1.0]]))
    assert out.dtype == torch.float32
    # 1 + 0.9 * 2 = 2.8: the third step was not executed.
    reward = decision_reward(
        torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[True, True, False]]), 0.9
    )
    assert reward.tolist() == [[pytest.approx(2.8)]]
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        decision_discount(torch.tensor([[1]]), 1.5)


def test_masks_must_be_bool():
    with pytest.raises(TypeError, match=r"torch\.int64"):
        action_mask(torch.ones(2, 3, dtype=torch.long), 7)
    with pytest.raises(ValueError, match="action_dim is 0"):
        action_mask(torch.ones(2, 3, dtype=torch.bool), 0)
