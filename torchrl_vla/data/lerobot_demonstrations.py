"""Demonstrations as LeRobot data sets: what ``demonstrations.record`` made, to disk and back.

Differs: a LeRobot row is an observation with the action taken in it, so the observation *after* the
last action is not stored. Reading repeats the last stored one in its place; it follows a success,
which ends the episode, so no update ever looks beyond it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from torchrl_vla.data import mapping as maps
from torchrl_vla.data.demonstrations import Episode
from torchrl_vla.data.lerobot import LeRobotDataset, Recording
from torchrl_vla.data.lerobot_layout import Feature, Layout
from torchrl_vla.data.lerobot_write import LeRobotWriter
from torchrl_vla.data.mapping import ACTION, IMAGE_PREFIX, STATE, DatasetMapping
from torchrl_vla.schema import SuiteMeta

EXECUTED = "action.executed"
"""Feature of the action that was done, noise included; ``action`` is what the teacher wanted."""
REWARD = "next.reward"
SUCCESS = "next.success"
DONE = "next.done"
INIT_STATE = "init_state_id"
UNKNOWN_INIT_STATE = -1
"""Initial state of episodes from elsewhere."""


def suite_features(meta: SuiteMeta, *, video: bool) -> dict[str, Feature]:
    """Return the features of a data set of this suite; cameras as video or as pictures."""
    size = (meta.image_size, meta.image_size, 3)
    cameras = {
        IMAGE_PREFIX + name: Feature("video" if video else "image", size) for name in meta.cameras
    }
    return cameras | {
        STATE: Feature("float32", (meta.state_dim,), meta.state_names),
        ACTION: Feature("float32", (meta.action_dim,), meta.action_names),
        EXECUTED: Feature("float32", (meta.action_dim,), meta.action_names),
        REWARD: Feature("float32", (1,)),
        SUCCESS: Feature("bool", (1,)),
        DONE: Feature("bool", (1,)),
        INIT_STATE: Feature("int64", (1,)),
    }


def write_demonstrations(
    folder: str | Path,
    episodes: Iterable[Episode],
    meta: SuiteMeta,
    *,
    video: bool = False,
    crf: int = 20,
) -> int:
    """Write successful episodes as a LeRobot v3.0 data set.

    Args:
        folder: The data set's folder; it must not exist yet.
        episodes: Taken one by one, so that they need not fit into memory together.
        meta: The suite they were recorded in.
        video: Store cameras as video (small, lossy) instead of PNG pictures (exact).
        crf: Quality of video: lower is better and larger.

    Returns:
        Number of episodes written.

    Raises:
        ValueError: no episode, or a control rate that is no whole number of Hz.
        FileExistsError: see :class:`~torchrl_vla.data.lerobot_write.LeRobotWriter`.
    """
    if meta.control_hz != round(meta.control_hz):
        raise ValueError(
            f"control_hz of suite {meta.name!r} is {meta.control_hz}, the format's fps must be a "
            "whole number"
        )
    count = 0
    with LeRobotWriter(
        folder,
        fps=round(meta.control_hz),
        features=suite_features(meta, video=video),
        robot_type=meta.name,
        crf=crf,
    ) as writer:
        for episode in episodes:
            length = len(episode.expert)
            last = np.arange(length) == length - 1
            columns = {
                STATE: episode.state[:-1].numpy(),
                ACTION: episode.expert.numpy(),
                EXECUTED: episode.executed.numpy(),
                REWARD: episode.reward.float().numpy(),
                SUCCESS: last,
                DONE: last,
                INIT_STATE: np.full(length, episode.init_state_id),
            }
            images = {
                IMAGE_PREFIX + name: episode.image[:-1, k].numpy()
                for k, name in enumerate(meta.cameras)
            }
            writer.add_episode(columns, images, meta.instructions[episode.task_id])
            count += 1
    return count


def read_demonstrations(
    meta: SuiteMeta,
    *,
    folder: str | Path,
    mapping: DatasetMapping | None = None,
    limit: int | None = None,
) -> list[Episode]:
    """Read the successful episodes of a LeRobot data set (v3.0 or v2.1) as a suite's own.

    Where the data set lacks them: the executed action is the action, the reward is 1 at the last
    step and 0 before, the initial state is unknown, and an episode counts as a success.

    Args:
        meta: The suite that the episodes shall serve.
        folder: The data set's folder.
        mapping: For a data set that was not written here.
        limit: Episodes to take at most, from the first on.

    Raises:
        FileNotFoundError: no data set, or a file of it is missing.
        ValueError: the data set cannot serve the suite; the message lists every reason, with both
            sides. Or no episode is left.
    """
    dataset = LeRobotDataset(folder)
    reader = _Reader(dataset.layout, meta, mapping or DatasetMapping())
    episodes, failures, left_out = [], 0, 0
    for number in range(len(dataset)):
        if limit is not None and len(episodes) == limit:
            break
        recording = dataset.read(number, reader.wanted)
        task_id = reader.task_id(recording, number)
        if task_id is None:
            left_out += 1
        elif not recording.columns.get(SUCCESS, np.ones(1, bool)).any():
            failures += 1
        else:
            episodes.append(reader.episode(recording, task_id, number))
    if failures or left_out:
        warnings.warn(
            f"{folder}: {failures} episodes without success and {left_out} of instructions mapped "
            f"to null are left out, {len(episodes)} are used",
            stacklevel=2,
        )
    if not episodes:
        raise ValueError(f"{folder}: no successful episode of the suite's instructions is in it")
    return episodes


class _Reader:
    """A data set's fit to a suite: found out once, applied to every episode."""

    def __init__(self, layout: Layout, meta: SuiteMeta, mapping: DatasetMapping) -> None:
        self._layout, self._meta = layout, meta
        problems: list[str] = []
        if layout.fps not in (meta.control_hz, mapping.accept_fps):
            problems.append(
                f"fps: the data set has {layout.fps:g}, the suite runs at {meta.control_hz:g} "
                f"control steps per second: accept_fps: {layout.fps:g} takes a row as a step "
                "all the same"
            )

        def attempt(check: Callable[..., Any], name: str, *args: Any) -> Any:
            try:
                return check(*args)
            except ValueError as error:
                problems.append(f"{name}: {error}")

        features = layout.features
        self._cameras = attempt(maps.camera_keys, "cameras", mapping, layout, meta)
        self._state = attempt(
            maps.sources, "state", mapping.state, STATE, meta.state_names, features
        )
        self._action = attempt(
            maps.sources, "action", mapping.action, ACTION, meta.action_names, features
        )
        self._instructions = attempt(maps.task_ids, "instructions", mapping, layout, meta)
        if problems:
            raise ValueError(
                f"data set {layout.folder} cannot serve suite {meta.name!r}:\n  "
                + "\n  ".join(problems)
            )
        extra = [REWARD, SUCCESS, INIT_STATE, *([EXECUTED] if mapping.action is None else [])]
        used = [source.feature for source in (*self._state, *self._action)]
        given = [key for key in extra if key in features]
        self.wanted = list(dict.fromkeys([*self._cameras, *used, *given]))

    def task_id(self, recording: Recording, number: int) -> int | None:
        """Return the suite's task id of an episode; None if the mapping leaves it out."""
        texts = set(recording.instructions)
        if len(texts) != 1:
            raise ValueError(
                f"{self._layout.folder}: episode {number} has {len(texts)} instructions "
                f"{sorted(texts)}, one episode serves one"
            )
        return self._instructions[texts.pop()]

    def episode(self, recording: Recording, task_id: int, number: int) -> Episode:
        """Return a recording as the suite's episode; the last observation is repeated."""
        meta, columns = self._meta, recording.columns
        features = self._layout.features
        try:
            state = maps.convert(self._state, meta.state_names, columns, features)
            action = maps.convert(self._action, meta.action_names, columns, features)
            maps.check_actions(action, meta.action_names)
        except ValueError as error:
            raise ValueError(f"{self._layout.folder}, episode {number}: {error}") from error
        images = [self._sized(recording.images[key]) for key in self._cameras]
        image = torch.stack(images, dim=1)
        length = len(action)
        reward = columns.get(REWARD, np.arange(length) == length - 1)
        init_state = columns.get(INIT_STATE, np.array([UNKNOWN_INIT_STATE]))
        return Episode(
            image=torch.cat([image, image[-1:]]),
            state=torch.from_numpy(np.concatenate([state, state[-1:]])),
            expert=torch.from_numpy(action),
            executed=torch.from_numpy(columns.get(EXECUTED, action)),
            reward=torch.from_numpy(reward.astype(np.float32)),
            task_id=task_id,
            init_state_id=int(init_state[0]),
        )

    def _sized(self, images: np.ndarray) -> torch.Tensor:
        """Return pictures ``[T, 3, h, w]`` in the suite's size."""
        pictures = torch.from_numpy(np.ascontiguousarray(images))
        size = self._meta.image_size
        if pictures.shape[-1] == size:
            return pictures
        resized = interpolate(
            pictures.float(), (size, size), mode="bilinear", antialias=True, align_corners=False
        )
        return resized.round().clamp(0, 255).to(torch.uint8)
