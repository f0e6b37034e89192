"""The learner's end of the replay: notes what actors wrote, encodes it once, draws minibatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from torchrl_vla import schema
from torchrl_vla.objectives.critics import ACTOR_ROWS, FEATURES, OUTCOME, STEPS
from torchrl_vla.replay.n_step import n_step
from torchrl_vla.replay.sampling import (
    FAILURE,
    SUCCESS,
    UNKNOWN,
    Ledger,
    Sampling,
    episode_outcomes,
)

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


def make_replay(folder: Path, capacity: int) -> TensorDictReplayBuffer:
    """Return a buffer shared between processes, on memory-mapped files under ``folder``.

    Raises:
        ValueError: ``capacity`` is below 1.
        FileExistsError: ``folder`` holds something already; a run never mixes in old data.
    """
    if capacity < 1:
        raise ValueError(f"replay capacity is {capacity}; it must be at least 1")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give the run a new folder or remove it")
    storage = LazyMemmapStorage(capacity, scratch_dir=folder)
    return TensorDictReplayBuffer(storage=storage, shared=True)


class ReplayFeed:
    """Draws minibatches by a :class:`Sampling` rule.

    Args:
        replay: the actors' buffer.
        capacity: its size.
        demonstrations: transitions ``[M]`` in the same layout, or ``None``.
        rule: which rows.
        encode: features of a batch of observations ``[B] -> [B, F]``; ``None`` to deliver images.
        seed: seed of the draws.
        tasks: number of task ids, needed by rules that tell rows apart.
        gamma: discount per control step, for ``n_steps``.
        n_steps: decisions that online rows look ahead; above 1 needs cached features.
        encode_rows: rows encoded at once.

    Raises:
        ValueError: a setting is out of its range, or demonstrations are asked for and missing.
    """

    def __init__(
        self,
        replay: TensorDictReplayBuffer,
        *,
        capacity: int,
        demonstrations: TensorDict | None,
        rule: Sampling,
        encode: Callable[[TensorDictBase], torch.Tensor] | None,
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
        self.replay, self.capacity = replay, capacity
        self.encode, self.encode_rows = encode, encode_rows
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = 0
        """Rows of the buffer that were taken note of, since the start."""
        self._noted: list[TensorDictBase] = []
        self._table: TensorDict | None = None
        self._demonstrations: TensorDict | None = None
        self._number_demonstrations = 0 if demonstrations is None else len(demonstrations)
        self._last = torch.zeros(0, dtype=torch.int64)
        self.ledger = Ledger(capacity, self._number_demonstrations, tasks * rule.by_class)
        if demonstrations is not None:
            schema.check_transitions(demonstrations, where="demonstrations into the replay")
            self._demonstrations = self._small(demonstrations) if encode else demonstrations
            self.ledger.outcome[capacity:] = episode_outcomes(demonstrations)

    def __len__(self) -> int:
        """Rows that can be drawn."""
        return min(self.seen, self.capacity)

    def absorb(self) -> TensorDictBase | None:
        """Take note of the rows that actors committed since the last call.

        Returns:
            Those rows (at most ``capacity`` per look at the buffer), or ``None``.
        """
        # One that was killed while it wrote never returns the lock; the actors' watch reports
        # that, if we do not wait here for ever.
        with self._locked(timeout=1.0) as held:
            if held:
                self._look()
        noted, self._noted = self._noted, []
        return torch.cat(noted) if noted else None

    @contextmanager
    def _locked(self, timeout: float) -> Iterator[bool]:
        """Keep writers out: one takes its places before it fills them."""
        held = self.replay._write_lock.acquire(timeout=timeout)
        try:
            yield held
        finally:
            if held:
                self.replay._write_lock.release()

    def _look(self) -> None:
        written = int(self.replay.write_count)
        if written == self.seen:
            return
        index = torch.arange(max(self.seen, written - self.capacity), written) % self.capacity
        rows = self.replay[index]
        if self.seen == 0:
            schema.check_transitions(rows, where="actors into the replay")
        self.ledger.note(index, rows)
        self._noted.append(rows)
        if self.encode is not None:
            small = self._small(rows)
            ids = rows.select(schema.EPISODE_ID, schema.DECISION)
            small = n_step(small.update(ids), self.n_steps, self.gamma).exclude(*ids.keys())
            if self._table is None:
                self._table = small[:1].expand(self.capacity).clone().zero_()
                if self._demonstrations is not None:
                    self._table = torch.cat([self._table, self._demonstrations])
                    self._demonstrations = None
            self._table[index] = small
        self.seen = written

    def sample(self, update: int = 0, version: int = 0) -> TensorDict:
        """Return one minibatch, online rows first, drawn with replacement.

        Args:
            update: for the annealed demonstration share.
            version: newest published policy, for ``max_policy_lag``.

        Returns:
            ``[batch_size]`` with ``"outcome"``; under ``"actor_rows"`` a second one of the same
            size, if the actor's share is set.

        Raises:
            RuntimeError: no online row has arrived yet, none is allowed by the rule, or a writer
                holds the buffer.
        """
        rule = self.rule
        if self.encode is not None and self._table is not None:
            return self._draw_and_take(update, version)
        if not rule.demonstrations(update) == rule.batch_size and self.encode is not None:
            raise RuntimeError("the replay is empty; wait for the actors' first transitions")
        # Images are read from the buffer itself, where actors may be writing over old rows.
        with self._locked(timeout=30.0) as held:
            if not held:
                raise RuntimeError(
                    "a writer has held the replay for 30 s; it died while it wrote (see the logs "
                    "of the actors). Resume the run"
                )
            self._look()
            return self._draw_and_take(update, version)

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

    def _draw(self, online: int, shown: int, positive_share: float | None) -> torch.Tensor:
        parts = []
        if online:
            if not len(self):
                raise RuntimeError("the replay is empty; wait for the actors' first transitions")
            parts.append(self._draw_online(online, positive_share))
        if shown:
            size = (self._number_demonstrations,)
            parts.append(self.capacity + torch.randint(*size, (shown,), generator=self.generator))
        return torch.cat(parts)

    def _draw_online(self, number: int, positive_share: float | None) -> torch.Tensor:
        if not self.rule.by_class:
            return torch.randint(len(self), (number,), generator=self.generator)
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

    def _take(self, index: torch.Tensor) -> TensorDict:
        out = self._table[index] if self._table is not None else self._read(index)
        out[OUTCOME] = self.ledger.outcome[index]
        return out

    def _read(self, index: torch.Tensor) -> TensorDict:
        """Read whole rows; the write lock is held."""
        online, shown = index[index < self.capacity], index[index >= self.capacity]
        parts = [self.replay[online]] if len(online) else []
        if len(shown):
            parts.append(self._demonstrations[shown - self.capacity])
        keys = set.intersection(*(set(part.keys(True, True)) for part in parts))
        return torch.cat([part.select(*keys) for part in parts])

    def metrics(self, version: int) -> dict[str, float]:
        """Return what the last minibatch (the critic's, if there are two) was made of.

        Args:
            version: newest published policy.
        """
        index = self._last
        lags = version - self.ledger.version[index[index < self.capacity]]
        outcome = self.ledger.outcome[index[index < self.capacity]]
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
    def _encode(self, rows: TensorDictBase) -> torch.Tensor:
        assert self.encode is not None
        return torch.cat([self.encode(part) for part in rows.split(self.encode_rows)])
