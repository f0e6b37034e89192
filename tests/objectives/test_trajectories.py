"""Held-back decisions: none lost, none used twice, none kept for ever."""

import pytest
import torch
from lanes import Lanes, pairs

from torchrl_vla import schema
from torchrl_vla.objectives.credit import COUNTED, VALID
from torchrl_vla.objectives.trajectories import Trajectories, padded

FOREVER = 10**6


def lengths(episode: int) -> int:
    return 1 + (7 * episode) % 5


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_every_decision_of_a_whole_group_comes_once(group_size: int):
    lanes = Lanes(4, lengths, group_size=group_size)
    held = Trajectories(group_size, FOREVER)
    collected, handed = [], []
    for version in range(20):
        rollout = lanes.round(3, version)
        collected += pairs(rollout.reshape(-1))
        held.add(rollout, version)
        rows = held.take()
        if rows is not None:
            handed += pairs(rows)
            ends = rows[schema.EPISODE_ID][rows[schema.DONE]]
            assert len(ends) % group_size == 0
    assert len(set(handed)) == len(handed)
    # what was collected and not handed over is held, and belongs to groups that still run
    rest = set(collected) - set(handed)
    assert len(rest) == held.held
    open_groups = {episode // group_size for episode, _ in rest}
    assert open_groups.isdisjoint({episode // group_size for episode, _ in handed})
    assert len(open_groups) <= 4  # at most one per lane
    assert held.given_up == held.void == 0


def test_rows_stand_episode_after_episode_in_time():
    lanes = Lanes(2, lambda e: 2, group_size=2)
    held = Trajectories(2, FOREVER)
    held.add(lanes.round(1), 0)
    assert held.take() is None
    assert held.held == 2
    held.add(lanes.round(1), 0)
    assert held.num_ready == 1
    assert pairs(held.take()) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert held.take() is None
    assert held.held == 0


def test_an_episode_over_three_rounds_keeps_its_versions():
    lanes = Lanes(1, lambda e: 5)
    held = Trajectories(1, FOREVER)
    for version in range(3):
        held.add(lanes.round(2, version), version)
    rows = held.take()
    assert pairs(rows) == [(0, d) for d in range(5)]
    assert rows[schema.POLICY_VERSION].flatten().tolist() == [0, 0, 1, 1, 2]
    assert held.held == 1  # the first decision of the next episode


def test_void_episodes_leave_and_the_rest_of_their_group_stays():
    # Group 0 is episodes 0, 1, 2; episode 1 diverges in its second decision.
    lanes = Lanes(3, lambda e: 2, group_size=3, broken=lambda e: e == 1)
    held = Trajectories(3, FOREVER)
    held.add(lanes.round(2), 0)
    assert pairs(held.take()) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert held.void == 2


def test_a_group_of_void_episodes_only_is_nothing():
    lanes = Lanes(2, lambda e: 1, group_size=2, broken=lambda e: e < 2)
    held = Trajectories(2, FOREVER)
    held.add(lanes.round(1), 0)
    assert (held.num_ready, held.take(), held.void, held.groups) == (0, None, 2, 0)


def test_groups_without_contrast_are_counted_and_dropped_on_request():
    # Groups of two: (1, 1) teaches nothing, (0, 1) does, (0, 0) does not.
    def pay(episode: int) -> float:
        return [1.0, 1.0, 0.0, 1.0, 0.0, 0.0][episode]

    for contrast_only, episodes in ((False, [0, 1, 2, 3, 4, 5]), (True, [2, 3])):
        lanes = Lanes(6, lambda e: 1, pay, group_size=2)
        held = Trajectories(2, FOREVER, contrast_only=contrast_only)
        held.add(lanes.round(1), 0)
        assert (held.groups, held.without_contrast) == (3, 2)
        assert held.num_ready == len(episodes) // 2
        assert held.take()[schema.EPISODE_ID].flatten().tolist() == episodes


def test_a_group_that_never_ends_is_given_up_when_all_of_it_is_old():
    # Episode 1 of the first group is taken away, as a resume would: episode 0 waits in vain.
    lanes = Lanes(2, lambda e: 1 if e < 2 else FOREVER, group_size=2)
    held = Trajectories(2, max_lag=2)
    held.add(lanes.round(1)[:1], 0)
    assert held.held == 1
    held.add(lanes.round(1, 2), 2)  # lag 2 is not too old; two decisions of the next group come
    assert (held.held, held.given_up) == (3, 0)
    held.add(lanes.round(1, 3), 3)
    assert (held.held, held.given_up) == (4, 1)
    # a group with one young decision stays whole, however old its first
    held.add(lanes.round(1, 9), 9)
    assert (held.held, held.given_up) == (6, 1)


def test_what_is_held_is_bounded_by_the_groups_that_run():
    lanes = Lanes(5, lengths, group_size=4)
    held = Trajectories(4, FOREVER)
    most = 0
    for version in range(60):
        held.add(lanes.round(2, version), version)
        held.take()
        most = max(most, held.held)
    assert most <= 5 * 4 * 5  # lanes x group size x longest episode


def test_disagreement_with_the_actors_is_an_error():
    lanes = Lanes(2, lambda e: 1, group_size=2)
    with pytest.raises(ValueError, match="2 finished episodes, group_size is 1"):
        Trajectories(1, 0).add(lanes.round(1), 0)
    lanes = Lanes(1, lambda e: 3)
    rollout = lanes.round(3)
    with pytest.raises(ValueError, match="episode 0 lacks decisions before number 2"):
        Trajectories(1, 0).add(rollout[:, [0, 2]], 0)
    with pytest.raises(ValueError, match="episode 0 lacks decisions before number 1"):
        Trajectories(1, 0).add(rollout[:, 1:], 0)


def test_padding_is_no_data():
    rows = Lanes(2, lambda e: 1).round(1).reshape(-1)
    rows[COUNTED] = rows[VALID] = torch.ones(2, 1, dtype=torch.bool)
    assert padded(rows, rows[:1], 2) is rows
    more = padded(rows, rows[:1], 4)
    assert more[COUNTED].flatten().tolist() == [True, True, False, False]
    assert torch.equal(more[:2][schema.EPISODE_ID], rows[schema.EPISODE_ID])
    nothing = padded(None, rows[:1], 3)
    assert len(nothing) == 3
    assert not nothing[VALID].any()
