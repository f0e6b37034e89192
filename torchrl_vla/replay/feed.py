"""The learner's end of the replay: notes what actors wrote, encodes it once, draws minibatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor

from torchrl_vla import schema
from torchrl_vla.objectives.critics import ACTOR_ROWS, FEATURES, OUTCOME, STEPS
from torchrl_vla.replay.sampling import (
    FAILURE,
    SUCCESS,
    UNKNOWN,
    Ledger,
    Sampling,
    episode_outcomes,
)
from torchrl_vla.storage.buffer import JournalReplayBuffer, walk
from torchrl_vla.storage.finder import Changes, RowGoneError
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.layout import Layout

SMALL = (
    schema.CHUNK,
    schema.POLICY_VERSION,
    schema.REWARD,
    schema.DONE,
    schema.TERMINATED,
    schema.SUCCESS,
    schema.EXECUTED_MASK,
    schema.NUM_EXECUTED,
)
"""What an update on cached features needs besides them."""
_NOTED = (*SMALL, schema.EPISODE_ID, schema.DECISION, schema.TASK_ID)
"""What the ledger and the loop want to know of every row."""
_LAST = (("next", FEATURES), schema.DONE, schema.TERMINATED)
"""What a row that looks ahead takes from the last decision."""
_TRIES = 100


def make_replay(
    folder: Path,
    capacity: int,
    layout: Layout,
    *,
    lanes: int = 1,
    spare: int | None = None,
    existing: str = "refuse",
    cursor: Mapping[str, Any] | None = None,
) -> JournalReplayBuffer:
    """Return a buffer that several processes write, on a journal in ``folder``.

    Args:
        folder: on a local disk; the replay owns it.
        capacity: rows.
        layout: of a row (:func:`torchrl_vla.storage.layout.transition_layout`).
        lanes: processes that write at the same time.
        spare: see :class:`~torchrl_vla.storage.journal.JournalStorage`, as are the others.
        existing: what to do with a replay that is there.
        cursor: where to go on (:meth:`ReplayFeed.cursor`).

    Raises:
        ValueError: a number is out of its range, another layout, or another replay's cursor.
        FileExistsError: ``folder`` holds something already; a run never mixes in old data.
        OSError: no room on the disk, or no right to write there.
    """
    storage = JournalStorage(
        folder, capacity, layout, lanes=lanes, spare=spare, existing=existing, cursor=cursor
    )
    return JournalReplayBuffer(storage=storage, shared=True)


class ReplayFeed:
    """Draws minibatches by a :class:`Sampling` rule.

    Rows are known by their place in the replay; demonstrations come behind the last place.

    Args:
        replay: the actors' buffer; rows that are in it already are taken in at the first look.
        demonstrations: transitions ``[M]`` in the same layout, or ``None``.
        rule: which rows.
        encode: features of a batch of observations ``[B] -> [B, F]``; ``None`` to deliver images.
        seed: seed of the draws.
        tasks: number of task ids, needed by rules that tell rows apart.
        gamma: discount per control step, for ``n_steps``.
        n_steps: decisions that online rows look ahead; above 1 needs cached features.
        encode_rows: rows read and encoded at once.

    Raises:
        ValueError: a setting is out of its range, or demonstrations are asked for and missing.
    """

    def __init__(
        self,
        replay: JournalReplayBuffer,
        *,
        demonstrations: TensorDict | None,
        rule: Sampling,
        encode: Callable[[TensorDictBase], Tensor] | None,
        seed: int,
        tasks: int = 0,
        gamma: float = 1.0,
        n_steps: int = 1,
        encode_rows: int = 128,
    ) -> None:
        if rule.uses_demonstrations and demonstrations is None:
            raise ValueError("demonstration_share is above 0 but there are no demonstrations")
        if rule.by_class and tasks < 1:
            raise ValueError(f"tasks is {tasks}; the sampling rule tells rows apart by task")
        if n_steps < 1 or (n_steps > 1 and encode is None):
            raise ValueError(
                f"n_steps is {n_steps}; it must be at least 1, and 1 when the trunk is trained "
                "(trunk_lr above 0), because images are drawn one decision at a time"
            )
        self.gamma, self.n_steps, self.rule = gamma, n_steps, rule
        self.storage: JournalStorage = replay.storage
        self.encode, self.encode_rows = encode, encode_rows
        self.generator = torch.Generator().manual_seed(seed)
        """Of the draws; save its state to go on with the same ones."""
        places = self.storage.max_size
        self._places = places
        self._seen: Changes | None = None
        self._checked = False  # the first rows against the schema
        self._commit = torch.zeros(places, dtype=torch.int64)
        self._noted: list[TensorDictBase] = []
        self._table: TensorDict | None = None
        self._leaves: dict[NestedKey, Tensor] = {}
        self._demonstrations: TensorDict | None = None
        self._number_demonstrations = 0 if demonstrations is None else len(demonstrations)
        self._last = torch.zeros(0, dtype=torch.int64)
        self.ledger = Ledger(places, self._number_demonstrations, tasks * rule.by_class)
        if demonstrations is not None:
            schema.check_transitions(demonstrations, where="demonstrations into the replay")
            self._demonstrations = self._small(demonstrations) if encode else demonstrations
            self.ledger.outcome[places:] = episode_outcomes(demonstrations)

    def __len__(self) -> int:
        """Online rows that were noted and not overwritten when last looked."""
        return self.ledger.rows

    def absorb(self) -> TensorDictBase | None:
        """Take note of the rows that actors committed since the last call.

        Returns:
            Their small columns (no images), or ``None``. Rows that were overwritten before anybody
            looked are not among them.
        """
        self._look()
        noted, self._noted = self._noted, []
        return torch.cat(noted) if noted else None

    def cursor(self) -> dict[str, Any]:
        """Return where the replay stood at the last look, for a checkpoint: plain JSON."""
        if self._seen is None:
            self._look()
        return self.storage.cursor(self._seen)

    def _look(self) -> None:
        self._seen = self.storage.changes(self._seen)
        if not len(self._seen.new) and not len(self._seen.gone):
            return
        self.ledger.forget(self._seen.gone)
        parts = (at.split(self.encode_rows) for at in (self._seen.new, self._seen.commits))
        for index, commits in zip(*parts, strict=True):
            whole = not self._checked or self.encode is not None
            index, commits, rows = self._intact(index, commits, whole)
            if not len(index):
                continue
            if not self._checked:
                schema.check_transitions(rows, where="actors into the replay")
                self._checked = True
            self._take_in(index, commits, rows)
        if self.encode is not None:  # images have been read for the only time
            self.storage.forget_pages()

    def _intact(
        self, index: Tensor, commits: Tensor, whole: bool
    ) -> tuple[Tensor, Tensor, TensorDict]:
        """Read rows, with images or without, but for those overwritten since the look."""
        while True:
            here = self.storage.holds(index, commits)
            index, commits = index[here], commits[here]
            try:
                rows = self.storage.get(index) if whole else self.storage.columns(index, _NOTED)
            except RowGoneError:
                continue
            if self.storage.holds(index, commits).all():
                return index, commits, rows

    def _take_in(self, index: Tensor, commits: Tensor, rows: TensorDict) -> None:
        self._commit[index] = commits
        self.ledger.note(index, rows, self.storage.next_places(index))
        self._noted.append(rows.select(*_NOTED))
        if self.encode is None:
            return
        small = self._small(rows)
        if self._table is None:
            self._table = small[:1].expand(self._places).clone().zero_()
            if self._demonstrations is not None:
                self._table = torch.cat([self._table, self._demonstrations])
                self._demonstrations = None
            self._leaves = dict(self._table.items(True, True))
        self._table[index] = small

    def sample(self, update: int = 0, version: int = 0) -> TensorDict:
        """Return one minibatch, online rows first, drawn with replacement.

        Args:
            update: for the annealed demonstration share.
            version: newest published policy, for ``max_policy_lag``.

        Returns:
            ``[batch_size]`` with ``"outcome"``; under ``"actor_rows"`` a second one of the same
            size, if the actor's share is set.

        Raises:
            RuntimeError: no online row has arrived yet, or none is allowed by the rule.
        """
        rule = self.rule
        if rule.demonstrations(update) < rule.batch_size and not len(self):
            raise RuntimeError("the replay is empty; wait for the actors' first transitions")
        for _ in range(_TRIES):
            try:
                return self._draw_and_take(update, version)
            except RowGoneError:  # images are read from the files, and a writer was faster
                self._look()
        raise RuntimeError(
            f"writers went {_TRIES} times round {self.storage.folder} while a minibatch was read; "
            "give the replay more capacity"
        )

    def can_draw(self, version: int = 0) -> bool:
        """Whether the rule allows any online row now (always, if it asks for none).

        Args:
            version: newest published policy, for ``max_policy_lag``.
        """
        rule = self.rule
        if not len(self):
            return False
        if not rule.by_class:
            return True
        if rule.max_policy_lag is not None:
            self.ledger.forget_older(version - rule.max_policy_lag)
        shares = (rule.positive_share, rule.actor_positive_share)
        ended = any(share is not None for share in shares)
        kinds = (SUCCESS, FAILURE) if ended else (SUCCESS, FAILURE, UNKNOWN)
        return any(self.ledger.known(kind) for kind in kinds)

    def _draw_and_take(self, update: int, version: int) -> TensorDict:
        rule = self.rule
        if rule.max_policy_lag is not None:
            self.ledger.forget_older(version - rule.max_policy_lag)
        shown = rule.demonstrations(update)
        self._last = self._draw(rule.batch_size - shown, shown, rule.positive_share)
        batch = self._take(self._last)
        if rule.actor_positive_share is not None:
            index = self._draw(rule.batch_size - shown, shown, rule.actor_positive_share)
            batch[ACTOR_ROWS] = self._take(index)
        return batch

    def _draw(self, online: int, shown: int, positive_share: float | None) -> Tensor:
        parts = []
        if online:
            parts.append(self._draw_online(online, positive_share))
        if shown:
            size = (self._number_demonstrations,)
            parts.append(self._places + torch.randint(*size, (shown,), generator=self.generator))
        return torch.cat(parts)

    def _draw_online(self, number: int, positive_share: float | None) -> Tensor:
        balanced, ledger = self.rule.balance_tasks, self.ledger
        try:
            if positive_share is None:
                kinds = (FAILURE, SUCCESS, UNKNOWN)
                return ledger.draw(number, kinds, balanced, self.generator)
            positive = round(number * positive_share)
            # With rows of one outcome only, they are the minibatch; positive_share reports it.
            if not ledger.known(SUCCESS):
                positive = 0
            elif not ledger.known(FAILURE):
                positive = number
            sides = ((positive, SUCCESS), (number - positive, FAILURE))
            drawn = [
                ledger.draw(count, (outcome,), balanced, self.generator)
                for count, outcome in sides
                if count
            ]
        except ValueError as error:
            raise RuntimeError(
                f"none of {len(self)} rows may be drawn: outcomes are not known yet, or all are "
                f"older than max_policy_lag={self.rule.max_policy_lag}; raise min_decisions or the "
                "bound"
            ) from error
        return torch.cat(drawn)

    def _take(self, index: Tensor) -> TensorDict:
        out = self._ahead(index) if self._table is not None else self._read(index)
        out[OUTCOME] = self.ledger.outcome[index]
        return out

    def _ahead(self, index: Tensor) -> TensorDict:
        """Take rows of the table; online ones look up to ``n_steps`` decisions ahead.

        Later decisions were chosen by the behaviour policy of their time; with a small ``n_steps``
        that bias is accepted, as in n-step Q-learning generally.
        """
        leaves = self._leaves

        def columns(rows: Tensor, keys: Sequence[NestedKey]) -> dict[NestedKey, Tensor]:
            return {key: leaves[key].index_select(0, rows) for key in keys}

        following = self.ledger.following
        total, steps, last = walk(columns, following, index, self.n_steps, self.gamma)
        out = TensorDict({}, batch_size=[len(index)])
        for key, leaf in leaves.items():
            out.set(key, leaf.index_select(0, last if key in _LAST else index))
        return out.set(schema.REWARD, total).set(STEPS, steps)

    def _read(self, index: Tensor) -> TensorDict:
        """Read whole rows; refuse one that is no longer the one that was noted."""
        online, shown = index[index < self._places], index[index >= self._places]
        parts = []
        if len(online):
            parts.append(self.storage.get(online))
            if not self.storage.holds(online, self._commit[online]).all():
                raise RowGoneError("a row was overwritten since it was noted")
        if len(shown):
            parts.append(self._demonstrations[shown - self._places])
        keys = set.intersection(*(set(part.keys(True, True)) for part in parts))
        return torch.cat([part.select(*keys) for part in parts])

    def metrics(self, version: int) -> dict[str, float]:
        """Return what the last minibatch (the critic's, if there are two) was made of.

        Args:
            version: newest published policy.
        """
        index = self._last
        lags = version - self.ledger.version[index[index < self._places]]
        outcome = self.ledger.outcome[index[index < self._places]]
        nothing = float("nan")
        return {
            "replay/rows": float(len(self)),
            "replay/positive_share": float((outcome == 1).float().mean()) if len(lags) else nothing,
            "policy_lag": float(lags.float().mean()) if len(lags) else nothing,
            "policy_lag_max": float(lags.max()) if len(lags) else nothing,
        }

    def _small(self, rows: TensorDictBase) -> TensorDict:
        out = rows.select(*SMALL).clone()
        out[STEPS] = rows[schema.NUM_EXECUTED].clone()
        out[FEATURES] = self._encode(rows)
        following = rows["next"].select("observation")
        following[schema.TASK_ID] = rows[schema.TASK_ID]
        out["next", FEATURES] = self._encode(following)
        return out

    @torch.no_grad()
    def _encode(self, rows: TensorDictBase) -> Tensor:
        assert self.encode is not None
        return torch.cat([self.encode(part) for part in rows.split(self.encode_rows)])
