"""What the off-policy learner draws from: the actors' transitions, demonstrations, their features.

The buffer is TorchRL's, on memory-mapped files that the actors write; images are uint8. With a
frozen trunk every observation is encoded once, when it arrives, and updates read the features.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import LazyMemmapStorage, TensorDictReplayBuffer

from torchrl_vla import schema

FEATURES = "features"
STEPS = "steps_to_next_obs"
"""Control steps between a row's observation and its ``next`` (the exponent of its discount)."""
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


def n_step(rows: TensorDict, n: int, gamma: float) -> TensorDict:
    """Let every row look up to ``n`` decisions ahead, inside its episode and inside ``rows``.

    Reward becomes the discounted sum, ``next`` (features, done, terminated) that of the last
    decision taken in, and ``steps_to_next_obs`` the control steps until there. Later decisions were
    chosen by the behaviour policy of that time; with a small ``n`` that bias is accepted, as in
    n-step Q-learning generally.

    Args:
        rows: ``[M]`` in time order per simulator, with ``episode_id`` and ``decision``.
        n: decisions, at least 1.
        gamma: discount per control step.
    """
    episode, decision = rows[schema.EPISODE_ID][:, 0], rows[schema.DECISION][:, 0]
    linked = torch.zeros(len(rows), dtype=torch.bool)
    linked[:-1] = (episode[1:] == episode[:-1]) & (decision[1:] == decision[:-1] + 1)
    linked &= ~rows[schema.DONE][:, 0]
    reward, executed = rows[schema.REWARD], rows[schema.NUM_EXECUTED]
    total, steps = reward.clone(), executed.clone()
    last = torch.arange(len(rows))
    going = linked.clone()
    for _ in range(n - 1):
        following = last[going] + 1
        total[going] += gamma ** steps[going] * reward[following]
        steps[going] += executed[following]
        last[going] = following
        going[going.clone()] = linked[following]
    out = rows.clone(recurse=False)
    out["next"] = rows["next"].clone(recurse=False)
    out[schema.REWARD], out[STEPS] = total, steps
    for key in (("next", FEATURES), schema.DONE, schema.TERMINATED):
        out[key] = rows[key][last]
    return out


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
    """Draws minibatches with a fixed share of demonstrations (RLPD, arXiv:2302.02948).

    Args:
        replay: the actors' buffer.
        capacity: its size.
        demonstrations: transitions ``[M]`` in the same layout, or ``None``.
        batch_size: rows per minibatch, on this rank.
        demonstration_share: share of the minibatch from demonstrations, in [0, 1].
        encode: features of a batch of observations ``[B] -> [B, F]``; ``None`` to deliver images.
        seed: seed of the draws.
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
        batch_size: int,
        demonstration_share: float,
        encode: Callable[[TensorDictBase], torch.Tensor] | None,
        seed: int,
        gamma: float = 1.0,
        n_steps: int = 1,
        encode_rows: int = 128,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= demonstration_share <= 1:
            raise ValueError(f"demonstration_share is {demonstration_share}; use 0 to 1")
        if demonstration_share and demonstrations is None:
            raise ValueError("demonstration_share is above 0 but there are no demonstrations")
        if n_steps < 1 or (n_steps > 1 and encode is None):
            raise ValueError(
                f"n_steps is {n_steps}; it must be at least 1, and 1 when the trunk is trained "
                "(trunk_lr above 0), because images are drawn one decision at a time"
            )
        self.gamma, self.n_steps = gamma, n_steps
        self.replay, self.capacity = replay, capacity
        self.num_demonstrations = round(batch_size * demonstration_share)
        self.num_online = batch_size - self.num_demonstrations
        self.encode, self.encode_rows = encode, encode_rows
        self.generator = torch.Generator().manual_seed(seed)
        self.seen = 0
        """Rows of the buffer that :meth:`absorb` has taken note of, since the start."""
        self._table: TensorDict | None = None
        self._demonstrations = None
        if demonstrations is not None:
            schema.check_transitions(demonstrations, where="demonstrations into the replay")
            self._demonstrations = self._small(demonstrations) if encode else demonstrations

    def __len__(self) -> int:
        """Rows that can be drawn."""
        return min(self.seen, self.capacity)

    def absorb(self) -> TensorDictBase | None:
        """Take note of the rows that actors committed since the last call.

        Returns:
            Those rows (at most ``capacity``), or ``None`` if there are none yet.
        """
        # A writer takes its places before it fills them. One that was killed in between never
        # returns the lock; the actors' watch reports that, if we do not wait here for ever.
        lock = self.replay._write_lock
        if not lock.acquire(timeout=1.0):
            return None
        try:
            written = int(self.replay.write_count)
            if written == self.seen:
                return None
            index = torch.arange(max(self.seen, written - self.capacity), written) % self.capacity
            rows = self.replay[index]
        finally:
            lock.release()
        if self.seen == 0:
            schema.check_transitions(rows, where="actors into the replay")
        if self.encode is not None:
            small = self._small(rows)
            ids = rows.select(schema.EPISODE_ID, schema.DECISION)
            small = n_step(small.update(ids), self.n_steps, self.gamma).exclude(*ids.keys())
            if self._table is None:
                self._table = small[:1].expand(self.capacity).clone().zero_()
            self._table[index] = small
        self.seen = written
        return rows

    def sample(self) -> TensorDict:
        """Return one minibatch, online rows first, drawn uniformly with replacement.

        Raises:
            RuntimeError: no online row has arrived yet.
        """
        parts = []
        if self.num_online:
            if not len(self):
                raise RuntimeError("the replay is empty; wait for the actors' first transitions")
            index = torch.randint(len(self), (self.num_online,), generator=self.generator)
            parts.append(self._take(index))
        if self.num_demonstrations:
            size = len(self._demonstrations)
            index = torch.randint(size, (self.num_demonstrations,), generator=self.generator)
            parts.append(self._demonstrations[index])
        keys = set.intersection(*(set(part.keys(True, True)) for part in parts))
        return torch.cat([part.select(*keys) for part in parts])

    def _take(self, index: torch.Tensor) -> TensorDictBase:
        if self._table is not None:
            return self._table[index]
        return self.replay[index]

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
