"""Which rows make a minibatch: the rule, and what has to be known about rows to follow it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from torchrl_vla import schema

FAILURE, SUCCESS, UNKNOWN = 0, 1, 2
"""Classes of a row by its episode's outcome; those of a task are ``3 * task_id + outcome``."""
_NONE = torch.iinfo(torch.int64).min
"""Episode id of a place without a row."""


@dataclass(frozen=True)
class Sampling:
    """Which rows make a minibatch.

    An online row is positive if its episode succeeded, negative if it failed. While the episode
    goes on that is not known: such rows are drawn by every rule but the two positive shares, which
    wait for the outcome. (A row whose episode never ends in the replay stays unknown.)
    """

    batch_size: int
    """Rows per update, on this rank."""
    demonstration_share: float = 0.0
    """Share of every minibatch that comes from demonstrations (RLPD, arXiv:2302.02948)."""
    demonstration_share_end: float | None = None
    """Share after ``demonstration_anneal_updates``; ``None``: it stays."""
    demonstration_anneal_updates: int | None = None
    """Updates over which the share goes to its end, linearly."""
    positive_share: float | None = None
    """Share of positive rows among the online ones; ``None``: as they come."""
    actor_positive_share: float | None = None
    """The same in a second minibatch for the actor's terms; ``None``: one minibatch for both."""
    balance_tasks: bool = False
    """Draw a task first, then one of its rows, so that no task is drowned by another."""
    max_policy_lag: int | None = None
    """Online rows of policies older than this many publishes are not drawn; ``None``: no bound."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")
        names = ("demonstration_share", "demonstration_share_end")
        for name in (*names, "positive_share", "actor_positive_share"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} is {share}; use 0 to 1")
        end, updates = self.demonstration_share_end, self.demonstration_anneal_updates
        if (end is None) != (updates is None):
            raise ValueError(
                f"demonstration_share_end is {end} and demonstration_anneal_updates {updates}; "
                "give both or neither"
            )
        if updates is not None and updates < 1:
            raise ValueError(f"demonstration_anneal_updates is {updates}; it is at least 1")
        if self.max_policy_lag is not None and self.max_policy_lag < 0:
            raise ValueError(f"max_policy_lag is {self.max_policy_lag}; it is at least 0")

    @property
    def by_class(self) -> bool:
        """Whether a draw needs to know which rows are of which class."""
        given = (self.positive_share, self.actor_positive_share, self.max_policy_lag)
        return self.balance_tasks or any(value is not None for value in given)

    @property
    def uses_demonstrations(self) -> bool:
        """Whether any minibatch has demonstrations in it."""
        return self.demonstration_share > 0 or bool(self.demonstration_share_end)

    def demonstrations(self, update: int) -> int:
        """Return how many rows of the minibatch of ``update`` are demonstrations."""
        share = self.demonstration_share
        if self.demonstration_share_end is not None:
            progress = min(1.0, update / self.demonstration_anneal_updates)
            share += progress * (self.demonstration_share_end - share)
        return round(self.batch_size * share)


class RowSets:
    """Disjoint sets of row numbers: changed in O(rows changed), drawn from in O(rows drawn).

    Args:
        rows: row numbers are below this.
        sets: how many sets.
    """

    def __init__(self, rows: int, sets: int) -> None:
        self.sizes = torch.zeros(sets, dtype=torch.int64)
        self.of_row = torch.full((rows,), -1, dtype=torch.int64)
        """Set of each row, -1 for none."""
        self._place = torch.zeros(rows, dtype=torch.int64)
        self._members = [torch.zeros(16, dtype=torch.int64) for _ in range(sets)]

    def move(self, rows: torch.Tensor, to: torch.Tensor | int) -> None:
        """Move distinct ``rows`` ``[k]`` to the sets ``to`` (``[k]`` or one for all; -1: none)."""
        to = torch.as_tensor(to).expand(len(rows))
        for old in self.of_row[rows].unique().tolist():
            if old >= 0:
                self._remove(old, rows[self.of_row[rows] == old])
        for new in to.unique().tolist():
            if new >= 0:
                self._add(new, rows[to == new])
        self.of_row[rows] = to

    def _add(self, number: int, rows: torch.Tensor) -> None:
        start, end = int(self.sizes[number]), int(self.sizes[number]) + len(rows)
        members = self._members[number]
        if end > len(members):
            members = self._members[number] = torch.cat([members, members.new_zeros(end)])
        members[start:end] = rows
        self._place[rows] = torch.arange(start, end)
        self.sizes[number] = end

    def _remove(self, number: int, rows: torch.Tensor) -> None:
        """Fill the holes with the last members."""
        size, members, place = int(self.sizes[number]), self._members[number], self._place[rows]
        kept = size - len(rows)
        stays = torch.ones(len(rows), dtype=torch.bool)
        stays[place[place >= kept] - kept] = False
        holes, movers = place[place < kept], members[kept:size][stays]
        members[holes] = movers
        self._place[movers] = holes
        self.sizes[number] = kept

    def draw_from(self, one: int, number: int, generator: torch.Generator) -> torch.Tensor:
        """Draw rows ``[number]`` of the set ``one``, uniformly and with replacement.

        Raises:
            ValueError: it is empty.
        """
        size = int(self.sizes[one])
        if not size:
            raise ValueError("there is nothing to draw from")
        return self._members[one][torch.randint(size, (number,), generator=generator)]

    def draw(
        self, number: int, blocks: list[list[int]], generator: torch.Generator
    ) -> torch.Tensor:
        """Draw with replacement: a non-empty block uniformly, then one of its rows uniformly.

        Args:
            number: rows to draw.
            blocks: sets that belong together.
            generator: of the draw.

        Returns:
            int64 ``[number]``.

        Raises:
            ValueError: all sets are empty.
        """
        order = torch.tensor([one for block in blocks for one in block])
        ends = self.sizes[order].cumsum(0)
        last = torch.tensor([len(block) for block in blocks]).cumsum(0) - 1
        block_end = ends[last]
        block_start = torch.cat([block_end.new_zeros(1), block_end[:-1]])
        full = (block_end > block_start).nonzero().squeeze(-1)
        if not len(full):
            raise ValueError("there is nothing to draw from")
        chosen = full[torch.randint(len(full), (number,), generator=generator)]
        span = (block_end - block_start)[chosen]
        offset = (torch.rand(number, generator=generator, dtype=torch.float64) * span).long()
        flat = block_start[chosen] + offset
        which = torch.searchsorted(ends, flat, right=True)
        place = flat - (ends - self.sizes[order])[which]
        rows = torch.empty(number, dtype=torch.int64)
        for one in which.unique().tolist():
            here = which == one
            rows[here] = self._members[int(order[one])][place[here]]
        return rows


class Ledger:
    """What is known about the online rows besides their content: version, task, outcome, order.

    Args:
        places: online rows are at places below this.
        extra: rows behind them that are known from the start (demonstrations).
        tasks: number of task ids; 0 keeps all rows in one class (no rule tells them apart).
    """

    def __init__(self, places: int, extra: int, tasks: int) -> None:
        self.places = places
        self.outcome = torch.full((places + extra, 1), -1, dtype=torch.int8)
        self.version = torch.full((places + extra,), -1, dtype=torch.int64)
        self.classes = RowSets(places, 3 * tasks or 1)
        self.tasks = tasks
        self.rows = 0
        """Online rows that are there."""
        self._task = torch.zeros(places, dtype=torch.int64)
        self._episode = torch.full((places + extra,), _NONE, dtype=torch.int64)
        self._decision = torch.zeros(places + extra, dtype=torch.int64)
        self._next = torch.full((places + extra,), -1, dtype=torch.int64)
        self._before = torch.zeros(places, dtype=torch.int64)  # which row waits for this place
        self._open: dict[int, list[torch.Tensor]] = {}
        self._by_version: dict[int, list[torch.Tensor]] = {}

    def note(self, index: torch.Tensor, rows: TensorDictBase, then: torch.Tensor) -> None:
        """Take note of ``rows`` ``[M]`` that now stand at ``index`` ``[M]``.

        Args:
            index: places, each once.
            rows: with the keys of ids, version, done and success.
            then: where the next decision of each row's episode is, or will be ``[M]``.
        """
        episode, version = rows[schema.EPISODE_ID][:, 0], rows[schema.POLICY_VERSION][:, 0]
        self.rows += int((self._episode[index] == _NONE).sum())
        self.outcome[index], self.version[index], self._episode[index] = -1, version, episode
        self._decision[index], self._next[index] = rows[schema.DECISION][:, 0], -1
        self._before[then] = index
        self._link(index)
        self._task[index] = rows[schema.TASK_ID][:, 0]
        self.classes.move(index, 3 * self._task[index] + UNKNOWN if self.tasks else 0)
        if self.tasks:
            for number in version.unique().tolist():
                self._by_version.setdefault(number, []).append(index[version == number])
        done, success = rows[schema.DONE][:, 0], rows[schema.SUCCESS][:, 0]
        for number in episode.unique().tolist():
            mine = episode == number
            self._open.setdefault(number, []).append(index[mine])
            if bool(done[mine].any()):
                self._close(number, int(success[mine].any()))
        if len(self._open) > self.places:  # ends that were never committed (a void episode)
            alive = set(self._episode.tolist())
            self._open = {key: value for key, value in self._open.items() if key in alive}

    def _close(self, episode: int, outcome: int) -> None:
        rows = torch.cat(self._open.pop(episode)).unique()
        rows = rows[self._episode[rows] == episode]  # the ring may have reused some
        self.outcome[rows] = outcome
        if self.tasks:
            rows = rows[self.classes.of_row[rows] >= 0]
            self.classes.move(rows, 3 * self._task[rows] + outcome)

    def forget(self, index: torch.Tensor) -> None:
        """Take note that the rows at the places ``index`` ``[M]`` are no longer there."""
        self.rows -= int((self._episode[index] != _NONE).sum())
        self._episode[index] = _NONE
        self.classes.move(index, -1)

    def _link(self, index: torch.Tensor) -> None:
        """Tell the rows that the new ones at ``index`` ``[M]`` continue where those are."""
        before = self._before[index]
        linked = self._episode[before] == self._episode[index]
        linked &= self._decision[before] + 1 == self._decision[index]
        self._next[before[linked]] = index[linked]

    def following(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return where each row's next decision is ``[M]``, and whether it is there ``[M]``.

        A row that is overwritten takes no other's next one away: those before it went earlier.
        """
        then = self._next[index]
        return then, then >= 0

    def forget_older(self, version: int) -> None:
        """Take rows of policies before ``version`` out of all classes."""
        for number in [key for key in self._by_version if key < version]:
            rows = torch.cat(self._by_version.pop(number)).unique()
            rows = rows[(self.version[rows] == number) & (self.classes.of_row[rows] >= 0)]
            self.classes.move(rows, -1)

    def draw(
        self, number: int, outcomes: tuple[int, ...], balanced: bool, generator: torch.Generator
    ) -> torch.Tensor:
        """Draw online rows whose episode ended as one of ``outcomes`` (any, with one class).

        Raises:
            ValueError: there is none.
        """
        if not self.tasks:
            return self.classes.draw_from(0, number, generator)
        blocks = [[3 * task + outcome for outcome in outcomes] for task in range(self.tasks)]
        if not balanced:
            blocks = [[one for block in blocks for one in block]]
        return self.classes.draw(number, blocks, generator)

    def known(self, outcome: int) -> bool:
        """Whether there is any row of that outcome to draw."""
        return bool(self.classes.sizes[outcome::3].any())


def episode_outcomes(rows: TensorDictBase) -> torch.Tensor:
    """Return the outcome of each row's episode, int8 ``[M, 1]``: 1 success, 0 failure, -1 open."""
    _, episode = rows[schema.EPISODE_ID][:, 0].unique(return_inverse=True)
    done, success = (
        torch.zeros(len(rows), dtype=torch.int64).index_add(0, episode, rows[key][:, 0].long()) > 0
        for key in (schema.DONE, schema.SUCCESS)
    )
    outcome = torch.where(done, success.to(torch.int8), -1).to(torch.int8)
    return outcome[episode].unsqueeze(-1)
