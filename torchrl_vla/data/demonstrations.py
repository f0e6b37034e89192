"""Demonstrations: record experts or policies, then view the record as chunks or as transitions.

One record serves both uses: behaviour cloning takes a sample at every control step (the next ``H``
expert actions, padded at the end of the episode), off-policy RL takes decisions of ``H`` steps with
their next observation. Nothing is rendered twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla import schema
from torchrl_vla.envs.simulator import SimulationError, Simulators


@dataclass(frozen=True)
class Episode:
    """One successful demonstration; ``T`` control steps, ``T + 1`` observations."""

    image: torch.Tensor
    """uint8 ``[T + 1, K, 3, h, w]``."""
    state: torch.Tensor
    """float32 ``[T + 1, S]``."""
    expert: torch.Tensor
    """float32 ``[T, A]``: what the expert wanted."""
    executed: torch.Tensor
    """float32 ``[T, A]``: what was done (the expert's action plus noise)."""
    reward: torch.Tensor
    """float32 ``[T]``."""
    task_id: int
    init_state_id: int


Teacher = Callable[[Simulators, int, int], np.ndarray]
"""Chooses an action: ``(simulators, init_state_id, step)`` to float32 ``[A]``, for simulator 0."""


def expert_teacher(simulators: Simulators, init_state_id: int, step: int) -> np.ndarray:
    """Choose what the suite's scripted expert would do."""
    return simulators.expert_action(0)


class PolicyTeacher:
    """Chooses what a policy does with exploration off, one chunk after the other.

    The random numbers of a decode that draws some depend on the episode and the decision only.

    Args:
        policy: Writes the chunk ``[1, H, A]`` for a TensorDict ``[1]`` of observations.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._policy = policy
        self._chunk: list[np.ndarray] = []

    def __call__(self, simulators: Simulators, init_state_id: int, step: int) -> np.ndarray:
        """Return the next action; a new episode forgets the rest of the last chunk."""
        if step == 0:
            self._chunk = []
        if not self._chunk:
            self._chunk = list(self._decide(simulators, init_state_id, step))
        return self._chunk.pop(0)

    def _decide(self, simulators: Simulators, init_state_id: int, step: int) -> np.ndarray:
        td = TensorDict(batch_size=[1])
        td[schema.IMAGE] = torch.from_numpy(simulators.render(0))[None]
        td[schema.STATE] = torch.from_numpy(simulators.state(0))[None]
        td[schema.TASK_ID] = torch.tensor([[simulators.task_id(0)]])
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            set_exploration_type(ExplorationType.DETERMINISTIC),
        ):
            torch.manual_seed(init_state_id * 1009 + step)
            return self._policy(td)[schema.CHUNK][0].numpy()


def record(
    simulators: Simulators,
    init_state_ids: Iterable[int],
    *,
    noise: float = 0.0,
    seed: int = 0,
    max_steps: int | None = None,
) -> list[Episode]:
    """Record the suite's expert, one episode per id; failed episodes are left out.

    Arguments as :func:`attempts`.

    Raises:
        ValueError: ``noise`` is negative, or no episode succeeded.
    """
    tried = attempts(simulators, init_state_ids, noise=noise, seed=seed, max_steps=max_steps)
    episodes = [episode for episode in tried if episode is not None]
    if not episodes:
        raise ValueError("the expert solved none of the given initial states: no demonstrations")
    return episodes


def attempts(
    simulators: Simulators,
    init_state_ids: Iterable[int],
    *,
    teacher: Teacher = expert_teacher,
    noise: float | Sequence[float] = 0.0,
    seed: int = 0,
    max_steps: int | None = None,
) -> Iterator[Episode | None]:
    """Let a teacher try one episode per id; yield it if it succeeds, else None.

    With ``noise`` the executed action is disturbed while the label stays the teacher's own choice,
    so the data shows how to come back from mistakes (DART, Laskey et al. 2017, arXiv:1703.09327).
    Differs: the noise is isotropic and its level given, where DART fits it to a learner's errors.

    Args:
        simulators: the suite; only simulator 0 is used.
        init_state_ids: where the episodes start.
        teacher: who chooses the actions.
        noise: standard deviation of Gaussian action noise, >= 0; of several levels, episodes take
            turns.
        seed: seed of the noise.
        max_steps: control steps per episode; the suite's limit if ``None``.

    Raises:
        ValueError: a level of ``noise`` is negative, or there is none.
    """
    levels = [float(noise)] if isinstance(noise, int | float) else list(noise)
    if not levels or min(levels) < 0:
        raise ValueError(f"noise is {noise}; it must be at least 0")
    rng = np.random.default_rng(seed)
    limit = simulators.meta.max_steps if max_steps is None else max_steps
    for number, init_state_id in enumerate(init_state_ids):
        level = levels[number % len(levels)]
        yield _record_one(simulators, int(init_state_id), teacher, level, rng, limit)


def _record_one(
    simulators: Simulators,
    init_state_id: int,
    teacher: Teacher,
    noise: float,
    rng: np.random.Generator,
    limit: int,
) -> Episode | None:
    simulators.reset(0, init_state_id)
    images, states = [simulators.render(0)], [simulators.state(0)]
    expert, executed, rewards = [], [], []
    task_id = simulators.task_id(0)
    for step in range(limit):
        wanted = teacher(simulators, init_state_id, step)
        action = np.clip(wanted + noise * rng.standard_normal(wanted.shape), -1, 1)
        action = action.astype(np.float32)
        try:
            outcome = simulators.step(0, action)
        except SimulationError:
            return None
        expert.append(wanted)
        executed.append(action)
        rewards.append(outcome.reward)
        images.append(simulators.render(0))
        states.append(simulators.state(0))
        if outcome.terminated or outcome.truncated:
            break
    if not outcome.success:
        return None
    image, state, wanted, done = (
        torch.from_numpy(np.stack(x)) for x in (images, states, expert, executed)
    )
    return Episode(image, state, wanted, done, torch.tensor(rewards), task_id, init_state_id)


def _chunk(actions: torch.Tensor, start: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``size`` actions from ``start`` (zero-padded) and the mask of the real ones."""
    real = actions[start : start + size]
    chunk = torch.zeros(size, actions.shape[-1])
    chunk[: len(real)] = real
    return chunk, torch.arange(size) < len(real)


def cloning_samples(episodes: list[Episode], chunk_size: int) -> TensorDict:
    """Return one sample per control step: observation and the expert's next ``H`` actions.

    Returns:
        TensorDict ``[M]`` with image, state, task_id, the chunk ``[M, H, A]`` and
        ``("next", "executed_mask")`` ``[M, H]``, False where the chunk reaches past the episode.
    """
    rows = []
    for episode in episodes:
        for t in range(len(episode.expert)):
            chunk, mask = _chunk(episode.expert, t, chunk_size)
            rows.append((episode.image[t], episode.state[t], episode.task_id, chunk, mask))
    image, state, task_id, chunk, mask = zip(*rows, strict=True)
    out = TensorDict(batch_size=[len(rows)])
    out[schema.IMAGE], out[schema.STATE] = torch.stack(image), torch.stack(state)
    out[schema.TASK_ID] = torch.tensor(task_id)[:, None]
    out[schema.CHUNK], out[schema.EXECUTED_MASK] = torch.stack(chunk), torch.stack(mask)
    return out


def decision_transitions(
    episodes: list[Episode], chunk_size: int, gamma: float, *, stride: int = 1
) -> TensorDict:
    """Return the episodes as decisions of ``H`` control steps, in the layout of the replay.

    A decision starts every ``stride`` control steps: any state may be one in which a decision is
    made, so overlapping chunks are as true as adjacent ones and there are ``H`` times as many.

    The actions are those that were executed. ``policy_version`` is -1: no policy chose them.
    Episode ids are negative, so they never meet an actor's.
    """
    rows = []
    for number, episode in enumerate(episodes):
        length = len(episode.executed)
        for decision, t in enumerate(range(0, length, stride)):
            chunk, mask = _chunk(episode.executed, t, chunk_size)
            end = min(t + chunk_size, length)
            row = TensorDict(batch_size=[])
            for key, index in (("observation", t), (("next", "observation"), end)):
                row[key] = TensorDict(
                    {"image": episode.image[index], "state": episode.state[index]}
                )
            rewards = episode.reward[t:end]
            last = torch.tensor([end == length])
            ids = {
                schema.TASK_ID: episode.task_id,
                schema.INIT_STATE_ID: episode.init_state_id,
                schema.GROUP_ID: episode.init_state_id,
                schema.EPISODE_ID: -1 - number,
                schema.DECISION: decision,
                schema.POLICY_VERSION: -1,
                schema.NUM_EXECUTED: end - t,
            }
            for key, value in ids.items():
                row[key] = torch.tensor([value])
            row[schema.CHUNK], row[schema.EXECUTED_MASK] = chunk, mask
            row[schema.REWARD] = (rewards * gamma ** torch.arange(len(rewards))).sum()[None]
            for key in (schema.TERMINATED, schema.DONE, schema.SUCCESS):
                row[key] = last.clone()
            for key in (schema.TRUNCATED, schema.SIM_ERROR):
                row[key] = torch.zeros(1, dtype=torch.bool)
            rows.append(row)
    return torch.stack(rows).contiguous()
