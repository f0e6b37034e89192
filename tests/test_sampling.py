"""Row sets, the ledger and the sampling rules, against one row at a time."""

import pytest
import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.replay.sampling import (
    FAILURE,
    SUCCESS,
    UNKNOWN,
    Ledger,
    RowSets,
    Sampling,
    episode_outcomes,
)

GENERATOR = torch.Generator().manual_seed(0)


def members(sets: RowSets, number: int) -> list[int]:
    return sets._members[number][: int(sets.sizes[number])].tolist()


def test_row_sets_follow_any_moves():
    generator = torch.Generator().manual_seed(1)
    sets, truth = RowSets(50, 4), [-1] * 50
    for _ in range(300):
        rows = torch.randperm(50, generator=generator)[: int(torch.randint(1, 9, (1,)))]
        to = torch.randint(-1, 4, (len(rows),), generator=generator)
        sets.move(rows, to)
        for row, new in zip(rows.tolist(), to.tolist(), strict=True):
            truth[row] = new
        for number in range(4):
            wanted = [row for row, own in enumerate(truth) if own == number]
            assert sorted(members(sets, number)) == wanted


def test_draws_are_uniform_over_the_rows_of_one_block():
    sets = RowSets(20, 3)
    sets.move(torch.arange(2), 0)
    sets.move(torch.arange(2, 10), 2)
    drawn = sets.draw(5000, [[0, 1, 2]], GENERATOR).bincount(minlength=10)
    # 10 rows, 500 each, standard deviation sqrt(5000 x .1 x .9) = 21
    assert (drawn - 500).abs().max() < 5 * 21


def test_blocks_are_drawn_equally_whatever_their_size():
    sets = RowSets(20, 4)
    sets.move(torch.tensor([7]), 0)
    sets.move(torch.arange(8, 17), 3)  # block 0: one row; block 1: nine; block 2 is empty
    drawn = sets.draw(4000, [[0], [3, 2], [1]], GENERATOR)
    share = (drawn == 7).float().mean()
    assert abs(float(share) - 0.5) < 5 * 0.008  # sqrt(.25 / 4000) = .0079
    with pytest.raises(ValueError, match="nothing to draw"):
        sets.draw(1, [[1]], GENERATOR)


def test_sets_grow_and_every_member_can_be_drawn():
    sets = RowSets(100_000, 1)
    for rows in torch.arange(100_000).split(7_000):
        sets.move(rows, 0)
    drawn = sets.draw(20_000, [[0]], GENERATOR)
    # deciles of 100,000 rows: 2,000 draws each, standard deviation sqrt(20000 x .1 x .9) = 42
    assert ((drawn // 10_000).bincount(minlength=10) - 2000).abs().max() < 5 * 42


def rows_of(*given: tuple[int, int, int, bool, bool]) -> TensorDict:
    """(episode, task, version, done, success) per row."""
    episode, task, version, done, success = (
        torch.tensor(column)[:, None] for column in zip(*given, strict=True)
    )
    out = TensorDict(batch_size=[len(given)])
    out[schema.EPISODE_ID], out[schema.TASK_ID] = episode, task
    out[schema.POLICY_VERSION], out[schema.DONE], out[schema.SUCCESS] = version, done, success
    out[schema.DECISION] = torch.zeros(len(given), 1, dtype=torch.int64)
    return out


def note(ledger: Ledger, index: torch.Tensor, rows: TensorDict) -> None:
    ledger.note(index, rows, then=index)


def test_outcomes_become_known_when_the_episode_ends():
    ledger = Ledger(places=6, extra=0, tasks=2)
    note(
        ledger,
        torch.arange(4),
        rows_of(
            (1, 0, 0, False, False),
            (2, 1, 0, False, False),
            (1, 0, 0, True, True),
            (2, 1, 0, False, False),
        ),
    )
    # episode 1 succeeded: rows 0 and 2; episode 2 goes on: rows 1 and 3 are unknown
    assert ledger.outcome[:4, 0].tolist() == [1, -1, 1, -1]
    assert ledger.classes.of_row[:4].tolist() == [SUCCESS, 3 + UNKNOWN, SUCCESS, 3 + UNKNOWN]
    assert not ledger.known(FAILURE)
    note(ledger, torch.tensor([4]), rows_of((2, 1, 1, True, False)))
    assert ledger.outcome[:5, 0].tolist() == [1, 0, 1, 0, 0]
    assert ledger.known(FAILURE)
    assert set(ledger.draw(50, (FAILURE,), False, GENERATOR).tolist()) == {1, 3, 4}


def test_the_ring_takes_rows_out_of_their_classes():
    ledger = Ledger(places=3, extra=0, tasks=1)
    note(ledger, torch.arange(3), rows_of(*[(1, 0, 0, False, False)] * 2, (1, 0, 0, False, False)))
    # row 0 is overwritten by another episode before episode 1 ends at row 1
    note(ledger, torch.tensor([0]), rows_of((2, 0, 1, False, False)))
    note(ledger, torch.tensor([1]), rows_of((1, 0, 1, True, True)))
    assert ledger.outcome[:, 0].tolist() == [-1, 1, 1]
    assert ledger.classes.of_row.tolist() == [UNKNOWN, SUCCESS, SUCCESS]


def test_forgotten_rows_stay_forgotten_when_their_episode_ends():
    ledger = Ledger(places=8, extra=0, tasks=1)
    note(ledger, torch.arange(3), rows_of(*[(1, 0, v, False, False) for v in (0, 2, 1)]))
    ledger.forget_older(2)  # versions are not sorted: rows 0 and 2
    assert ledger.classes.of_row[:3].tolist() == [-1, UNKNOWN, -1]
    note(ledger, torch.tensor([3]), rows_of((1, 0, 3, True, True)))
    assert ledger.classes.of_row[:4].tolist() == [-1, SUCCESS, -1, SUCCESS]


def test_forgotten_places_are_in_no_class():
    ledger = Ledger(places=4, extra=0, tasks=0)
    note(ledger, torch.arange(3), rows_of(*[(1, 0, 0, False, False)] * 3))
    ledger.forget(torch.tensor([0, 2, 3]))
    assert ledger.rows == 1
    assert set(ledger.draw(20, (SUCCESS,), False, GENERATOR).tolist()) == {1}
    note(ledger, torch.tensor([1, 2]), rows_of((2, 0, 1, True, True), (2, 0, 1, False, False)))
    assert ledger.rows == 2


def test_void_episodes_do_not_pile_up():
    ledger = Ledger(places=4, extra=0, tasks=0)
    for number in range(50):  # none of them ever ends
        note(ledger, torch.tensor([number % 4]), rows_of((number, 0, 0, False, False)))
    assert len(ledger._open) <= 5


def test_outcomes_of_recorded_episodes():
    rows = rows_of(
        (-1, 0, -1, False, False),
        (-2, 0, -1, True, False),
        (-1, 0, -1, True, True),
        (-3, 0, -1, False, False),
    )
    assert episode_outcomes(rows)[:, 0].tolist() == [1, 0, 1, -1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"positive_share": 1.5}, "positive_share is 1.5"),
        ({"actor_positive_share": -1.0}, "actor_positive_share is -1.0"),
        ({"demonstration_share_end": 0.1}, "give both or neither"),
        ({"demonstration_anneal_updates": 10}, "give both or neither"),
        (
            {"demonstration_share_end": 0.1, "demonstration_anneal_updates": 0},
            "anneal_updates is 0",
        ),
        ({"max_policy_lag": -1}, "max_policy_lag is -1"),
    ],
)
def test_rules_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(batch_size=8, **settings)
