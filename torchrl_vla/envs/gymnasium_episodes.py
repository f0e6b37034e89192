"""Gymnasium environments stepped so that every autoreset mode looks the same: no reset unasked.

Two drivers with the same methods: one for ``gymnasium.make``, one for ``gymnasium.make_vec``. An
episode begins with an explicit ``reset``, which also clears what an autoreset mode had planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Step:
    """What one step gave; ``observation`` and ``info`` are never the next episode's."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Mapping[str, Any]


class Single:
    """An environment of ``gymnasium.make``; one inside ``Autoreset`` is reset before it does."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, seed: int) -> Any:
        return self.env.reset(seed=seed)[0]

    def step(self, action: Any) -> Step:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return Step(observation, float(reward), bool(terminated), bool(truncated), info)

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()


class VectorOfOne:
    """An environment that exists as a vector environment: a vector of one, unpacked."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space

    def reset(self, seed: int) -> Any:
        return _first(self.env.reset(seed=[seed])[0])

    def step(self, action: Any) -> Step:
        from gymnasium.vector.utils import concatenate, create_empty_array

        batch = concatenate(self.action_space, [action], create_empty_array(self.action_space, n=1))
        observation, reward, terminated, truncated, info = self.env.step(batch)
        ended = bool(terminated[0] or truncated[0])
        if ended and "final_obs" in info:  # SAME_STEP: ``observation`` is the next episode's
            observation, info = info["final_obs"][0], _unpack(info["final_info"])
        else:
            observation, info = _first(observation), _unpack(info)
        return Step(observation, float(reward[0]), bool(terminated[0]), bool(truncated[0]), info)

    def render(self) -> Any:
        return self.env.render()[0]

    def close(self) -> None:
        self.env.close()


def _first(batch: Any) -> Any:
    """Return the first element of a batched observation, nested in dicts."""
    if isinstance(batch, Mapping):
        return {key: _first(value) for key, value in batch.items()}
    return batch[0]


def _unpack(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first environment's info; Gymnasium marks ``key`` present in ``_key``."""
    return {
        key: _unpack(value) if isinstance(value, Mapping) else value[0]
        for key, value in info.items()
        if not key.startswith("_") and f"_{key}" in info and info[f"_{key}"][0]
    }
