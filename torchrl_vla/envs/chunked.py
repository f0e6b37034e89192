"""One TorchRL environment over N simulators that executes an action chunk per step.

What the room is for: turning a decision (an action chunk) into one transition, with exact
bookkeeping. A step runs up to ``H`` control steps in each simulator, stops a simulator the moment
its episode ends, adds ``gamma^k r_k`` over the steps that really ran, says which ones those were,
and renders once. What it does not do: normalise observations (policies do) or choose actions.

TorchRL's own composition (``MultiAction`` and transforms) is not used: it loses the reward of an
episode that ends inside a chunk, has no executed-step mask, and pays its framework cost per
control step (measured in ``benchmarks/rollout.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.data.vla import ActionTokenizerBase
from torchrl.envs import EnvBase

from torchrl_vla import schema
from torchrl_vla.envs.simulator import SimulationError, Simulators, SuiteMeta

IDS_PER_STREAM = 1_000_000
"""Initial states one stream may hand out before it would meet the next stream's."""


@dataclass
class InitStateStream:
    """Hands out initial-state ids: a pure function of (split, stream, position).

    Streams of one split never share an id, so every actor gets its own stream and two actors, ranks
    or seeds never see the same episode start. With ``group_size`` > 1 each id is handed out that
    many times in a row (the start of a group for group-relative advantages).
    """

    split: range
    """Ids this stream may use (``SPLITS`` of the suite)."""
    stream: int
    """Which block of ``IDS_PER_STREAM`` ids of the split."""
    group_size: int = 1
    """Episodes per initial state."""
    position: int = 0
    """Episodes handed out so far; save it to resume exactly."""

    def __post_init__(self) -> None:
        limit = len(self.split) // IDS_PER_STREAM
        if not 0 <= self.stream < limit:
            raise ValueError(
                f"init-state stream {self.stream} is outside 0..{limit - 1}; use a smaller seed"
            )
        if self.group_size < 1:
            raise ValueError(f"group_size is {self.group_size}; it must be at least 1")

    def draw(self) -> tuple[int, int, int]:
        """Return ``(init_state_id, group_id, episode_id)`` of the next episode.

        Raises:
            RuntimeError: the stream is used up.
        """
        group, episode = self.position // self.group_size, self.position
        if group >= IDS_PER_STREAM:
            raise RuntimeError(
                f"init-state stream {self.stream} handed out all {IDS_PER_STREAM} ids; start "
                "another stream"
            )
        self.position += 1
        init_state_id = self.split.start + self.stream * IDS_PER_STREAM + group
        return init_state_id, init_state_id, self.stream * IDS_PER_STREAM * 1000 + episode


class FixedInitStates:
    """Hands out a fixed list of initial-state ids, once each; for evaluation and demonstrations.

    When the list is used up it keeps handing out the last id, and the caller ignores those episodes
    (the batch is only as small as its slowest simulator).
    """

    def __init__(self, ids: list[int]) -> None:
        if not ids:
            raise ValueError("no initial-state ids given; at least one is needed")
        self.ids = list(ids)
        self.position = 0

    def draw(self) -> tuple[int, int, int]:
        """Return ``(init_state_id, group_id, episode_id)``; ``episode_id`` is the list position."""
        episode = self.position
        self.position += 1
        init_state_id = self.ids[min(episode, len(self.ids) - 1)]
        return init_state_id, init_state_id, episode


class ChunkedEnv(EnvBase):
    """N simulators of one suite as one batched ``EnvBase``; a step is one decision.

    Reads ``("vla_action", "chunk")`` float32 ``[N, H, A]`` in [-1, 1], or, with an
    ``action_tokenizer``, ``("vla_action", "tokens")`` int64 ``[N, H, A]``. Writes the keys that
    :mod:`torchrl_vla.schema` lists for ``envs``.

    Args:
        simulators: the N simulators.
        init_states: where episodes start.
        chunk_size: ``H``, control steps per decision.
        gamma: discount per control step, in (0, 1].
        action_tokenizer: if given, the environment takes tokens and decodes them with it.
        max_steps: control steps until truncation; the suite's own limit if ``None``.
        on_step: called after every step with the number of control steps that ran (heartbeats).
        on_control_step: called after every control step with the simulator's index (videos).

    Raises:
        ValueError: a setting is outside its range, or (in ``step``) an action is not finite or
            outside [-1, 1].
    """

    def __init__(
        self,
        simulators: Simulators,
        init_states: InitStateStream | FixedInitStates,
        *,
        chunk_size: int,
        gamma: float = 1.0,
        action_tokenizer: ActionTokenizerBase | None = None,
        max_steps: int | None = None,
        on_step: Callable[[ChunkedEnv, int], None] | None = None,
        on_control_step: Callable[[int], None] | None = None,
    ) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size}; it must be at least 1")
        if not 0.0 < gamma <= 1.0:
            raise ValueError(f"gamma is {gamma}; it must be in (0, 1]")
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps is {max_steps}; it must be at least 1")
        num_envs = simulators.num_envs
        super().__init__(device="cpu", batch_size=torch.Size([num_envs]))
        self.simulators = simulators
        self.init_states = init_states
        self.chunk_size = chunk_size
        self.gamma = gamma
        self.action_tokenizer = action_tokenizer
        self.max_steps = simulators.meta.max_steps if max_steps is None else max_steps
        self.on_step = on_step
        self.on_control_step = on_control_step
        self.num_sim_errors = 0
        """Episodes voided because physics diverged."""
        self.num_episodes = 0
        """Episodes that ended, void ones included."""
        self.num_successes = 0
        self._elapsed = np.zeros(num_envs, dtype=np.int64)
        self._ids = np.zeros((num_envs, 4), dtype=np.int64)  # init_state, group, episode, task
        self._decision = np.zeros(num_envs, dtype=np.int64)
        self._last: TensorDict | None = None
        self._make_specs()

    @property
    def meta(self) -> SuiteMeta:
        """The suite's constants (instructions, cameras, names)."""
        return self.simulators.meta

    def _make_specs(self) -> None:
        meta, n, h = self.meta, self.batch_size[0], self.chunk_size
        image = (n, len(meta.cameras), 3, meta.image_size, meta.image_size)

        def scalar(dtype: torch.dtype) -> Unbounded:
            return Unbounded(shape=(n, 1), dtype=dtype)

        def flags(width: int) -> Categorical:
            return Categorical(2, shape=(n, width), dtype=torch.bool)

        self.observation_spec = Composite(
            observation=Composite(
                image=Bounded(low=0, high=255, shape=image, dtype=torch.uint8),
                state=Unbounded(shape=(n, meta.state_dim), dtype=torch.float32),
                shape=(n,),
            ),
            task_id=scalar(torch.int64),
            init_state_id=scalar(torch.int64),
            group_id=scalar(torch.int64),
            episode_id=scalar(torch.int64),
            decision=scalar(torch.int64),
            success=flags(1),
            sim_error=flags(1),
            executed_mask=flags(h),
            num_executed=scalar(torch.int64),
            shape=(n,),
        )
        shape = (n, h, meta.action_dim)
        if self.action_tokenizer is None:
            action = Composite(
                chunk=Bounded(low=-1.0, high=1.0, shape=shape, dtype=torch.float32), shape=(n,)
            )
        else:
            tokens = Categorical(self.action_tokenizer.vocab_size, shape=shape, dtype=torch.int64)
            action = Composite(tokens=tokens, shape=(n,))
        self.action_spec = Composite(vla_action=action, shape=(n,))
        self.reward_spec = scalar(torch.float32)
        self.done_spec = Composite(
            done=flags(1), terminated=flags(1), truncated=flags(1), shape=(n,)
        )

    def _set_seed(self, seed: int | None) -> None:
        if seed is None or isinstance(self.init_states, FixedInitStates):
            return
        limit = len(self.init_states.split) // IDS_PER_STREAM
        self.init_states.stream = int(seed) % limit
        self.init_states.position = 0

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        mask = None if tensordict is None else tensordict.get("_reset", None)
        index = range(self.batch_size[0]) if mask is None else mask.flatten().nonzero().flatten()
        for i in map(int, index):
            init_state_id, group_id, episode_id = self.init_states.draw()
            self.simulators.reset(i, init_state_id)
            self._ids[i] = (init_state_id, group_id, episode_id, self.simulators.task_id(i))
            self._elapsed[i] = self._decision[i] = 0
        out = self._observe(range(self.batch_size[0]) if self._last is None else map(int, index))
        n = self.batch_size[0]
        out.update(self.done_spec.zero())
        out["success"] = torch.zeros(n, 1, dtype=torch.bool)
        out["sim_error"] = torch.zeros(n, 1, dtype=torch.bool)
        out["executed_mask"] = torch.zeros(n, self.chunk_size, dtype=torch.bool)
        out["num_executed"] = torch.zeros(n, 1, dtype=torch.int64)
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        chunk = self._chunk(tensordict)
        n, h = self.batch_size[0], self.chunk_size
        reward = np.zeros((n, 1), dtype=np.float32)
        executed = np.zeros((n, h), dtype=bool)
        terminated, cut, success, sim_error = (np.zeros((n, 1), dtype=bool) for _ in range(4))
        for i in range(n):
            steps = min(h, self.max_steps - int(self._elapsed[i]))
            try:
                for k in range(steps):
                    outcome = self.simulators.step(i, chunk[i, k])
                    executed[i, k] = True
                    reward[i] += self.gamma**k * outcome.reward
                    if self.on_control_step is not None:
                        self.on_control_step(i)
                    if outcome.terminated or outcome.truncated:
                        terminated[i], cut[i] = outcome.terminated, outcome.truncated
                        success[i] = outcome.success
                        break
            except SimulationError:
                sim_error[i], reward[i] = True, 0.0
        num_executed = executed.sum(-1, keepdims=True)
        self._elapsed += num_executed[:, 0]
        self._decision += 1
        timed_out = (self._elapsed >= self.max_steps)[:, None]
        truncated = ((timed_out | cut) & ~terminated) | sim_error
        self.num_sim_errors += int(sim_error.sum())
        self.num_episodes += int((terminated | truncated).sum())
        self.num_successes += int(success.sum())
        # A diverged simulator has no meaningful picture: its last good observation stays.
        out = self._observe(i for i in range(n) if not sim_error[i, 0])
        for key, value in (
            ("reward", reward),
            ("terminated", terminated),
            ("truncated", truncated),
            ("done", terminated | truncated),
            ("success", success),
            ("sim_error", sim_error),
            ("executed_mask", executed),
            ("num_executed", num_executed),
        ):
            out[key] = torch.from_numpy(value)
        if self.on_step is not None:
            self.on_step(self, int(num_executed.sum()))
        return out

    def _chunk(self, tensordict: TensorDictBase) -> np.ndarray:
        if self.action_tokenizer is None:
            chunk = tensordict.get(schema.CHUNK)
        else:
            chunk = self.action_tokenizer.decode(tensordict.get(schema.TOKENS))
        chunk = chunk.detach().numpy()
        if not np.isfinite(chunk).all():
            bad = sorted(set(np.argwhere(~np.isfinite(chunk))[:, 0].tolist()))
            raise ValueError(f"actions of simulators {bad} are not finite; the policy diverged")
        if np.abs(chunk).max() > 1.0 + 1e-6:
            raise ValueError(
                f"an action is {np.abs(chunk).max():.4f} in magnitude; the limit is 1 "
                "(actions are in [-1, 1]): clip or squash it in the policy"
            )
        return chunk

    def _observe(self, index: object) -> TensorDict:
        """Observe the simulators in ``index``; the others keep what they last showed."""
        meta, n = self.meta, self.batch_size[0]
        if self._last is None:
            size = meta.image_size
            image = torch.zeros(n, len(meta.cameras), 3, size, size, dtype=torch.uint8)
            state = torch.zeros(n, meta.state_dim)
        else:
            image = self._last["observation", "image"].clone()
            state = self._last["observation", "state"].clone()
        images, states = image.numpy(), state.numpy()
        for i in index:
            images[i] = self.simulators.render(i)
            states[i] = self.simulators.state(i)
        observation = TensorDict({"image": image, "state": state}, batch_size=[n])
        self._last = TensorDict({"observation": observation}, batch_size=[n])
        ids = torch.from_numpy(self._ids.copy())
        return TensorDict(
            {
                "observation": TensorDict({"image": image, "state": state}, batch_size=[n]),
                "task_id": ids[:, 3:],
                "init_state_id": ids[:, 0:1],
                "group_id": ids[:, 1:2],
                "episode_id": ids[:, 2:3],
                "decision": torch.from_numpy(self._decision.copy())[:, None],
            },
            batch_size=[n],
        )

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the simulators (render contexts)."""
        self.simulators.close()
        super().close(raise_if_closed=raise_if_closed)
