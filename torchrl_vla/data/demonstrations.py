"""Demonstrations: record scripted experts, then view the record as chunks or as transitions.

One record serves both uses: behaviour cloning takes a sample at every control step (the next ``H``
expert actions, padded at the end of the episode), off-policy RL takes decisions of ``H`` steps with
their next observation. Nothing is rendered twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict

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


def record(
    simulators: Simulators,
    init_state_ids: Iterable[int],
    *,
    noise: float = 0.0,
    seed: int = 0,
    max_steps: int | None = None,
) -> list[Episode]:
    """Record the suite's expert, one episode per id; failed episodes are left out.

    With ``noise`` the executed action is disturbed while the label stays the expert's own choice,
    so the data shows how to come back from mistakes (DART, Laskey et al. 2017, arXiv:1703.09327).

    Args:
        simulators: the suite; only simulator 0 is used.
        init_state_ids: where the episodes start.
        noise: standard deviation of Gaussian action noise, >= 0.
        seed: seed of the noise.
        max_steps: control steps per episode; the suite's limit if ``None``.

    Raises:
        ValueError: ``noise`` is negative, or no episode succeeded.
    """
    if noise < 0:
        raise ValueError(f"noise is {noise}; it must be at least 0")
    rng = np.random.default_rng(seed)
    limit = simulators.meta.max_steps if max_steps is None else max_steps
    episodes = []
    for init_state_id in init_state_ids:
        episode = _record_one(simulators, int(init_state_id), noise, rng, limit)
        if episode is not None:
            episodes.append(episode)
    if not episodes:
        raise ValueError("the expert solved none of the given initial states: no demonstrations")
    return episodes


def _record_one(
    simulators: Simulators, init_state_id: int, noise: float, rng: np.random.Generator, limit: int
) -> Episode | None:
    simulators.reset(0, init_state_id)
    images, states = [simulators.render(0)], [simulators.state(0)]
    expert, executed, rewards = [], [], []
    task_id = simulators.task_id(0)
    for _ in range(limit):
        wanted = simulators.expert_action(0)
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
        if outcome.terminated:
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
