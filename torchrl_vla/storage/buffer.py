"""TorchRL's replay buffer on a journal: the writer, and the ways to choose rows.

One :class:`JournalReplayBuffer` goes to the collectors as it is. A learner with a sampler of its
own makes a second one on the same storage; they share nothing but the files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torch import Tensor
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, Sampler
from torchrl.data.replay_buffers.writers import Writer

from torchrl_vla import schema
from torchrl_vla.storage.finder import Changes, RowGoneError
from torchrl_vla.storage.journal import JournalStorage

STEPS = "steps_to_next_obs"


class JournalWriter(Writer):
    """Appends to the lane of the process it runs in.

    It has generations as TorchRL knows them, so that a minibatch says under ``"index_generation"``
    which rows it is made of, and not only which places.
    """

    tracks_generations = True

    @property
    def _write_count(self) -> int:
        return self._storage.write_count

    def add(self, data: TensorDictBase) -> Tensor:
        """Append one row."""
        return self.extend(data.unsqueeze(0))[0]

    def extend(self, data: TensorDictBase) -> Tensor:
        """Append rows ``[M]``; returns their indices."""
        return self._storage.append(data)

    def generations_of(self, index: int | Tensor) -> Tensor:
        """Return the commit numbers of the rows at places ``index``; 0: it is being written."""
        return torch.as_tensor(self._storage.rings.commit[np.asarray(index)])

    def _empty(self, empty_write_count: bool = True) -> None:
        raise NotImplementedError("a journal is not emptied; open a new folder")

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the storage knows where its lanes stand."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take nothing."""

    def dumps(self, path: Any) -> None:
        """Write nothing."""

    def loads(self, path: Any) -> None:
        """Read nothing."""


def _as_they_are(rows: TensorDict) -> TensorDict:
    return rows  # the storage returns them in one batch


class JournalReplayBuffer(TensorDictReplayBuffer):
    """A :class:`~torchrl.data.TensorDictReplayBuffer` whose processes need no lock.

    TorchRL holds one lock over every write and every sample, and a process that is killed inside
    never gives it back. Here a writer has a lane to itself and readers notice overwritten rows.

    Args:
        storage: a :class:`~torchrl_vla.storage.journal.JournalStorage`.
        kwargs: as for TorchRL's buffer; ``writer`` and ``collate_fn`` are given.
    """

    _TRIES = 100

    def __init__(self, *, storage: JournalStorage, **kwargs: Any) -> None:
        super().__init__(storage=storage, writer=JournalWriter(), collate_fn=_as_they_are, **kwargs)

    def share(self, shared: bool = True) -> JournalReplayBuffer:
        """Share between processes; there is nothing to set up."""
        self.shared = shared
        self._write_lock = contextlib.nullcontext()
        return self

    def for_lane(self, lane: int) -> JournalReplayBuffer:
        """Return a buffer for the process that writes ``lane``, and no other lane."""
        storage = self.storage
        return JournalReplayBuffer(
            storage=JournalStorage.attached(storage.folder, storage.layout, lane), shared=True
        )

    def update_tensordict_priority(self, data: TensorDictBase) -> int:
        """Set the priorities of a sampled minibatch ``[M]``, as TorchRL's buffer does.

        Returns:
            How many rows got theirs. A row that was overwritten since the draw is passed over: the
            row in its place keeps its own. Rows that were not drawn (TorchRL's ``add``) have no
            ``"index_generation"``; then those are meant that are at ``"index"`` now.
        """
        if not isinstance(self._sampler, PrioritizedRows):
            return 0
        of = self._get_priority_vector if data.ndim else self._get_priority_item
        index, commits = data["index"].flatten(), data.get("index_generation", None)
        if commits is None:
            commits = self._writer.generations_of(index)
        return self._sampler.update_rows(index, commits.flatten(), torch.as_tensor(of(data)))

    def _sample(self, batch_size: int) -> tuple[Any, dict]:
        for _ in range(self._TRIES - 1):
            with contextlib.suppress(RowGoneError):  # a writer was faster: draw anew
                return super()._sample(batch_size)
        return super()._sample(batch_size)


class PrioritizedRows(PrioritizedSampler):
    """TorchRL's prioritized sampler (arXiv:1511.05952) on rows that other processes write.

    New rows get the highest priority so far, rows that left lose theirs; priorities are kept in
    the replay's files and are there when it is opened again. For one learner process.

    Args:
        storage: the replay.
        alpha: exponent of the priority.
        beta: exponent of the importance weight.
        kwargs: as for TorchRL's sampler.

    Raises:
        RuntimeError: TorchRL's compiled extension is not there.
    """

    def __init__(
        self, storage: JournalStorage, alpha: float = 0.6, beta: float = 0.4, **kwargs: Any
    ) -> None:
        try:
            super().__init__(storage.max_size, alpha, beta, **kwargs)
        except RuntimeError as error:
            if "SegmentTree" not in str(error):
                raise
            raise RuntimeError(
                "prioritized replay needs TorchRL's compiled extension, which did not load with "
                f"torch {torch.__version__}; install the torch that this TorchRL was built for, or "
                "draw uniformly"
            ) from error
        self._journal = storage
        self._seen: Changes | None = None

    def sample(self, storage: JournalStorage, batch_size: int) -> tuple[Tensor, dict]:
        """Draw indices ``[batch_size]`` and their ``priority_weight``."""
        self._catch_up()
        if not len(storage):
            raise RuntimeError(f"the replay {storage.folder} is empty; nothing can be drawn yet")
        return super().sample(_Places(storage), batch_size)

    def update_priority(
        self, index: Tensor, priority: Tensor, *, storage: JournalStorage | None = None
    ) -> None:
        """Set priorities of the rows that are at places ``[M]`` now; others are passed over."""
        index = torch.as_tensor(index, dtype=torch.int64).flatten()
        commits = torch.from_numpy(self._journal.rings.commit[index.numpy()])
        self.update_rows(index, commits, torch.as_tensor(priority))

    def update_rows(self, index: Tensor, commits: Tensor, priority: Tensor) -> int:
        """Set the priorities of those rows that are still there.

        Args:
            index: places ``[M]``.
            commits: commit numbers of the rows that were there ``[M]``.
            priority: ``[M]``, or one for all.

        Returns:
            How many are there.
        """
        priority = priority.detach().float().expand(len(index))
        self._catch_up()
        here = self._journal.holds(index, commits) & (torch.as_tensor(self._sum_tree[index]) > 0)
        if here.any():
            index, commits, priority = index[here], commits[here], priority[here]
            super().update_priority(index, priority)
            kept = self._journal.rings.priority
            kept[index.numpy()] = priority.numpy()
            gone = ~self._journal.holds(index, commits)  # a writer was as fast as this
            kept[index[gone].numpy()] = np.nan
        return int(here.sum())

    def _catch_up(self) -> None:
        self._seen = self._journal.changes(self._seen)
        gone = self._seen.gone
        if len(gone):
            self._sum_tree[gone] = torch.zeros(len(gone))
            self._min_tree[gone] = torch.full((len(gone),), torch.inf)
        self._admit(self._seen.new)

    def _admit(self, index: Tensor) -> None:
        if not len(index):
            return
        known = torch.from_numpy(self._journal.rings.priority[index.numpy()])
        old = ~known.isnan()
        if old.any():
            super().update_priority(index[old], known[old])
        if not old.all():
            super().update_priority(index[~old], torch.as_tensor(float(self.default_priority)))


class _Places:
    """Shows TorchRL's sampler every place; those without a row have no priority."""

    ndim = 1

    def __init__(self, storage: JournalStorage) -> None:
        self._count = storage.max_size

    def __len__(self) -> int:
        return self._count


class FreshRows(Sampler):
    """Draws uniformly from rows whose ``policy_version`` is at most ``max_lag`` behind.

    TorchRL's ``StalenessAwareSampler`` reads every row, images too, at every draw.

    Args:
        max_lag: versions; at least 0.
        version_key: integer column.

    Raises:
        ValueError: ``max_lag`` is below 0.
    """

    _ROUNDS = 8

    def __init__(self, max_lag: int, version_key: NestedKey = schema.POLICY_VERSION) -> None:
        if max_lag < 0:
            raise ValueError(f"max_lag is {max_lag}; it must be at least 0")
        self.max_lag, self.version_key = max_lag, version_key
        self.learner_version = 0
        """To be set by the learner."""

    def sample(self, storage: JournalStorage, batch_size: int) -> tuple[Tensor, dict]:
        """Draw indices ``[batch_size]``.

        Raises:
            RuntimeError: no row is fresh enough.
        """
        found = torch.empty(0, dtype=torch.int64)
        for _ in range(self._ROUNDS):
            drawn = storage.draw(batch_size, self._rng)
            found = torch.cat([found, drawn[self._fresh(storage, drawn)]])
            if len(found) >= batch_size:
                return found[:batch_size], {}
        rows = storage.live()
        fresh = rows[self._fresh(storage, rows)]
        if not len(fresh):
            raise RuntimeError(
                f"none of {len(rows)} rows has a policy_version of at least "
                f"{self.learner_version - self.max_lag} (learner version {self.learner_version}, "
                f"max_lag {self.max_lag}); raise max_lag or publish more often"
            )
        more = torch.randint(len(fresh), (batch_size - len(found),), generator=self._rng)
        return torch.cat([found, fresh[more]]), {}

    def _fresh(self, storage: JournalStorage, index: Tensor) -> Tensor:
        version = storage.columns(index, [self.version_key]).get(self.version_key)
        return version.flatten() >= self.learner_version - self.max_lag

    def state_dict(self) -> dict[str, Any]:
        """Return the learner's version."""
        return {"learner_version": self.learner_version}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the learner's version."""
        self.learner_version = int(state_dict["learner_version"])

    def _empty(self) -> None:
        self.learner_version = 0

    def dumps(self, path: Any) -> None:
        """Write nothing: the learner sets its version."""

    def loads(self, path: Any) -> None:
        """Read nothing."""


def walk(
    columns: Callable[[Tensor, Sequence[NestedKey]], Mapping[NestedKey, Tensor] | TensorDictBase],
    following: Callable[[Tensor], tuple[Tensor, Tensor]],
    index: Tensor,
    n: int,
    gamma: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up the rewards of up to ``n`` decisions from each row, inside its episode.

    Args:
        columns: returns the named columns of rows ``[K]``.
        following: returns where the next decision of rows ``[K]`` is, and whether it is there.
        index: rows ``[M]``.
        n: decisions, at least 1.
        gamma: discount per control step.

    Returns:
        Discounted sum of the rewards ``[M, 1]``, control steps ``[M, 1]``, and the row of the last
        decision taken in ``[M]``.

    Raises:
        ValueError: ``n`` is below 1.
    """
    if n < 1:
        raise ValueError(f"n is {n}; it must be at least 1")
    keys = (schema.REWARD, schema.NUM_EXECUTED, schema.DONE)
    at = columns(index, keys)
    total, steps = at[schema.REWARD].clone(), at[schema.NUM_EXECUTED].clone()
    last, going = index, ~at[schema.DONE]
    for _ in range(n - 1):
        then, there = following(last)
        going = going & there.unsqueeze(-1)
        last = torch.where(going.squeeze(-1), then, last)
        at = columns(last, keys)
        total += torch.where(going, gamma**steps * at[schema.REWARD], 0.0)
        steps += torch.where(going, at[schema.NUM_EXECUTED], 0)
        going = going & ~at[schema.DONE]
    return total, steps, last


def look_ahead(
    storage: JournalStorage,
    index: Tensor,
    n: int,
    gamma: float,
    *,
    keys: Sequence[NestedKey] = (schema.DONE, schema.TERMINATED),
) -> TensorDict:
    """Return rows that look up to ``n`` decisions ahead inside their episode.

    Reward becomes the discounted sum, ``next`` observation and ``keys`` are those of the last
    decision taken in, and ``steps_to_next_obs [M, 1]`` counts the control steps until there.

    Args:
        storage: the replay, with this package's keys for reward, executed steps and done.
        index: places ``[M]``.
        n: decisions, at least 1.
        gamma: discount per control step.
        keys: columns taken from the last decision besides its ``next`` observation.

    Raises:
        ValueError: ``n`` is below 1.
        RowGoneError: a row was overwritten meanwhile; draw again.
    """
    commits = torch.from_numpy(storage.rings.commit[index.numpy()])
    out = storage.get(index)
    total, steps, last = walk(storage.columns, storage.following, index, n, gamma)
    ends = storage.get(last)
    if not storage.holds(index, commits).all():  # rows are overwritten from the oldest on
        raise RowGoneError("a row was overwritten while later ones were read")
    for column in storage.layout.observations:
        out["next", *column.key] = ends["next", *column.key]
    for key in keys:
        out[key] = ends[key]
    out[schema.REWARD], out[STEPS] = total, steps
    return out
