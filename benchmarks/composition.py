"""What TorchRL composes by itself for chunked actions: the rival of ``benchmarks/rollout.py``.

One environment per simulator, one control step per ``_step``; ``MultiAction`` unrolls the chunk
around it. Built as well as we know how: simulators of one process share a renderer, tensors that
did not change are handed out again, and images may be drawn at the end of a chunk only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.data.vla import UniformActionTokenizer
from torchrl.envs import (
    EnvBase,
    MultiAction,
    ParallelEnv,
    SerialEnv,
    StepCounter,
    Transform,
    TransformedEnv,
)
from torchrl.envs.transforms import ActionTokenizerTransform, Compose, SuccessReward

from torchrl_vla.envs.chunked import InitStateStream
from torchrl_vla.envs.simulator import Simulators
from torchrl_vla.envs.tabletop import TabletopSuite

CONTROL_STEPS = "control_steps"
"""Control steps of the running episode, int64 ``[1]``; differences count what was executed."""
Placement = Literal["outer", "inner"]
"""Chunk transforms around the batch of environments, or inside each of them."""


class ControlStepEnv(EnvBase):
    """One simulator, one control step per ``_step``; action float32 ``[A]`` in [-1, 1].

    Args:
        simulators: shared by the environments of one process.
        index: which of them this is.
        init_states: where episodes start.
        render_every: draw on every such control step of an episode, and on the one that ends it.
    """

    def __init__(
        self,
        simulators: Simulators,
        index: int,
        init_states: InitStateStream,
        *,
        render_every: int,
    ) -> None:
        super().__init__(device="cpu", batch_size=torch.Size([]))
        self.simulators, self.index, self.init_states = simulators, index, init_states
        self.render_every = render_every
        self._steps = 0
        self._image = torch.zeros(0, dtype=torch.uint8)
        self._task_id = torch.zeros(1, dtype=torch.int64)
        meta, size = simulators.meta, simulators.meta.image_size
        image = (len(meta.cameras), 3, size, size)
        self.observation_spec = Composite(
            observation=Composite(
                image=Bounded(low=0, high=255, shape=image, dtype=torch.uint8),
                state=Unbounded(shape=(meta.state_dim,), dtype=torch.float32),
            ),
            task_id=Unbounded(shape=(1,), dtype=torch.int64),
            control_steps=Unbounded(shape=(1,), dtype=torch.int64),
            success=Categorical(2, shape=(1,), dtype=torch.bool),
        )
        self.action_spec = Bounded(low=-1, high=1, shape=(meta.action_dim,), dtype=torch.float32)
        self.reward_spec = Unbounded(shape=(1,), dtype=torch.float32)
        flag = Categorical(2, shape=(1,), dtype=torch.bool)
        self.done_spec = Composite(done=flag, terminated=flag.clone())

    def _set_seed(self, seed: int | None) -> None:
        pass  # episodes come from init_states

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: object) -> TensorDictBase:
        self.simulators.reset(self.index, self.init_states.draw()[0])
        self._steps = 0
        self._task_id = torch.tensor([self.simulators.task_id(self.index)])
        self._image = torch.from_numpy(self.simulators.render(self.index))
        return self._observation(terminated=False, success=False)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        outcome = self.simulators.step(self.index, tensordict["action"].numpy())
        self._steps += 1
        if outcome.terminated or self._steps % self.render_every == 0:
            self._image = torch.from_numpy(self.simulators.render(self.index))
        out = self._observation(terminated=outcome.terminated, success=outcome.success)
        out["reward"] = torch.tensor([outcome.reward])
        return out

    def _observation(self, *, terminated: bool, success: bool) -> TensorDict:
        flag = torch.tensor([terminated])
        observation = TensorDict(
            {"image": self._image, "state": torch.from_numpy(self.simulators.state(self.index))}
        )
        return TensorDict(
            {
                "observation": observation,
                "task_id": self._task_id,
                CONTROL_STEPS: torch.tensor([self._steps]),
                "success": torch.tensor([success]),
                "done": flag,
                "terminated": flag.clone(),
            }
        )

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the shared simulators (a second call does nothing)."""
        self.simulators.close()
        super().close(raise_if_closed=raise_if_closed)


def chunk_transforms(num_bins: int, max_decisions: int) -> Transform:
    """Return TorchRL's own transforms for tokenised chunks and a sparse success reward."""
    return Compose(
        MultiAction(stack_rewards=False),
        ActionTokenizerTransform(UniformActionTokenizer(num_bins, low=-1.0, high=1.0)),
        SuccessReward(),
        StepCounter(max_decisions),
    )


def composed_env(
    kind: Literal["serial", "parallel"],
    num_envs: int,
    *,
    placement: Placement,
    lazy: bool,
    chunk_size: int,
    num_bins: int,
) -> EnvBase:
    """Compose ``num_envs`` single-simulator environments into one that takes token chunks.

    Args:
        kind: all in this process, or each in a spawned worker.
        num_envs: ``E``.
        placement: where the chunk transforms are.
        lazy: render at the end of a chunk only, instead of at every control step.
        chunk_size: ``H``.
        num_bins: ``V``.
    """
    suite = TabletopSuite()
    max_decisions = suite.meta.max_steps // chunk_size
    transforms = partial(chunk_transforms, num_bins, max_decisions)
    shared = suite.simulators(num_envs) if kind == "serial" else None
    makers = [
        partial(
            _single,
            suite,
            shared,
            stream,
            render_every=chunk_size if lazy else 1,
            transforms=transforms if placement == "inner" else None,
        )
        for stream in range(num_envs)
    ]
    if kind == "serial":
        env = SerialEnv(num_envs, makers)
    else:
        env = ParallelEnv(num_envs, makers, mp_start_method="spawn")
    return TransformedEnv(env, transforms()) if placement == "outer" else env


def _single(
    suite: TabletopSuite,
    shared: Simulators | None,
    stream: int,
    *,
    render_every: int,
    transforms: Callable[[], Transform] | None,
) -> EnvBase:
    torch.set_num_threads(1)
    simulators, index = (suite.simulators(1), 0) if shared is None else (shared, stream)
    env = ControlStepEnv(
        simulators,
        index,
        InitStateStream(suite.splits["train"], stream),
        render_every=render_every,
    )
    return env if transforms is None else TransformedEnv(env, transforms())
