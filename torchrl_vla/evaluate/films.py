"""Evaluation episodes as one mp4: instruction, outcome, and what the policy expects to get.

They play one after the other (:func:`film`) or side by side (:func:`film_grid`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import av
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_vla import schema
from torchrl_vla.envs.simulator import Simulators
from torchrl_vla.evaluate.episodes import EpisodeResult, run_episodes
from torchrl_vla.video import EpisodeVideo, GridVideo, Mp4, Outcome

VALUE = "state_value"
LABELS: dict[str, Outcome] = {"success": "SUCCESS", "time out": "TIME OUT"}
MAX_FPS = 30.0
"""Of a grid: environments with faster control show every second, third, ... control step."""
Judge = Callable[[TensorDictBase], str]
Video = TypeVar("Video", bound=Mp4)


def label(result: EpisodeResult) -> Outcome:
    """Return the word that a film shows for an outcome."""
    return LABELS.get(result.outcome, "FAILURE")


def state_value(decided: TensorDictBase) -> str:
    """Say the state value that the policy wrote, or nothing if it writes none."""
    value = decided.get(VALUE, None)
    return "" if value is None else f"value {value.item():.2f}"


def q_judge(policy: nn.Module, heads: Sequence[nn.Module]) -> Judge:
    """Return what says the smallest Q of a decision's chunk over an ensemble.

    Args:
        policy: has ``features(td [1]) -> [1, F]``.
        heads: ``(features [*, F], chunk [*, H, A]) -> [*, 1]``.
    """

    def judge(decided: TensorDictBase) -> str:
        with torch.no_grad():
            features, chunk = policy.features(decided), decided[schema.CHUNK]
            return f"Q {min(head(features, chunk).item() for head in heads):.2f}"

    return judge


class _Recorder(Generic[Video]):
    """Writes until the writer fails; then says so once and lets the episodes go on."""

    def __init__(self, path: Path, open_video: Callable[[], Video]) -> None:
        self._path = path
        self._video: Video | None = None
        self._guard(partial(self._open, open_video))

    def _open(self, open_video: Callable[[], Video]) -> None:
        self._video = open_video()

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, RuntimeError, ValueError, av.FFmpegError) as error:
            warnings.warn(
                f"no video at {self._path}: {type(error).__name__}: {error}", stacklevel=2
            )
            self.discard()

    def write(self, action: Callable[[Video], None]) -> None:
        """Do something with the video, if it is still there."""
        if (video := self._video) is not None:
            self._guard(lambda: action(video))

    def discard(self) -> None:
        video, self._video = self._video, None
        if video is not None:
            video.discard()

    def __enter__(self) -> _Recorder[Video]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Name the file, unless something went wrong."""
        if kind is None:
            self.write(lambda video: video.close())
        self.discard()  # what was closed is kept


def film(
    policy: nn.Module,
    simulators: Simulators,
    init_state_ids: Sequence[int],
    path: Path,
    *,
    chunk_size: int,
    size: int = 320,
    judge: Judge = state_value,
) -> list[EpisodeResult]:
    """Write the episodes as one mp4 with instruction, judgement and outcome drawn in.

    Frames go to disk one by one. A writer that fails (a full disk, a missing encoder) is a warning
    and leaves no file: the episodes go on without it. Failures of policy and simulator are raised.

    Args:
        policy: as in :func:`~.episodes.run_episodes`.
        simulators: one simulator, which offers ``render_frame(index, size)``.
        init_state_ids: where the episodes start.
        path: the ``.mp4``.
        chunk_size: ``H``.
        size: frame height and width [px].
        judge: says in words what is expected of a decision, from what the policy wrote in it, batch
            ``[1]``; shown until the next one. See :func:`q_judge`.

    Raises:
        ValueError: there are several simulators, whose frames would mix.
    """
    if simulators.num_envs != 1:
        raise ValueError(f"{simulators.num_envs} simulators given; a film needs exactly one")
    meta = simulators.meta
    recorder = _Recorder(path, lambda: EpisodeVideo(path, meta.control_hz))
    note = ""

    def judged(_: int, decided: TensorDictBase) -> None:
        nonlocal note
        note = judge(decided)

    def add_frame(index: int) -> None:
        instruction = meta.instructions[simulators.task_id(index)]
        frame = simulators.render_frame(index, size)
        recorder.write(lambda video: video.add(frame, instruction, note))

    with recorder:
        return run_episodes(
            policy,
            simulators,
            init_state_ids,
            chunk_size=chunk_size,
            on_decision=judged,
            on_control_step=add_frame,
            on_episode=lambda result: recorder.write(lambda video: video.finish(label(result))),
        )


def film_grid(
    policy: nn.Module,
    simulators: Simulators,
    init_state_ids: Sequence[int],
    path: Path,
    *,
    chunk_size: int,
    size: int = 256,
    judge: Judge = state_value,
) -> list[EpisodeResult]:
    """Write the episodes as one mp4 in which all of them play at once, each in its tile.

    What :func:`film` says holds here, too. In memory are the frames of one decision per tile. The
    video shows at most :data:`MAX_FPS` frames per second of simulated time.

    Args:
        policy: as in :func:`~.episodes.run_episodes`.
        simulators: one for every episode, each offers ``render_frame(index, size)``.
        init_state_ids: where the episodes start, each another state.
        path: the ``.mp4``.
        chunk_size: ``H``.
        size: height and width of a tile's frame [px].
        judge: as in :func:`film`.

    Raises:
        ValueError: the numbers of simulators and states differ, or a state is given twice.
    """
    if not len(set(init_state_ids)) == len(init_state_ids) == simulators.num_envs:
        raise ValueError(
            f"{simulators.num_envs} simulators for the initial states {list(init_state_ids)}; a "
            "grid needs one simulator per state and every state once"
        )
    grid = _Grid(simulators, init_state_ids, path, size, judge)
    with grid.recorder:
        results = run_episodes(
            policy,
            simulators,
            init_state_ids,
            chunk_size=chunk_size,
            on_decision=grid.judged,
            on_control_step=grid.stepped,
            on_episode=grid.ended,
        )
        grid.hold()
    return results


class _Grid:
    """Collects what every simulator shows during a decision, then writes it step by step.

    Simulators execute their chunks one after the other, and a video shows them at one time.
    """

    def __init__(
        self,
        simulators: Simulators,
        init_state_ids: Sequence[int],
        path: Path,
        size: int,
        judge: Judge,
    ) -> None:
        hertz = simulators.meta.control_hz
        self._simulators, self._size, self._judge = simulators, size, judge
        self._tile_of = {state: tile for tile, state in enumerate(init_state_ids)}
        count = len(init_state_ids)
        self._every = math.ceil(hertz / MAX_FPS)
        self._texts = [("", "")] * count
        """Instruction and judgement."""
        self._steps = [0] * count
        self._frames: list[list[np.ndarray]] = [[] for _ in range(count)]
        self._outcomes: dict[int, Outcome] = {}
        """Of the tiles whose episode is over."""
        self._finished: set[int] = set()
        """Tiles that show their outcome."""
        self.recorder = _Recorder(path, lambda: GridVideo(path, hertz / self._every, count))

    def judged(self, index: int, decided: TensorDictBase) -> None:
        """Note what is expected of a decision; all decisions before it are executed."""
        if index == 0:
            self._flush()
        if index not in self._outcomes:
            instruction = self._simulators.meta.instructions[self._simulators.task_id(index)]
            self._texts[index] = instruction, self._judge(decided)

    def stepped(self, index: int) -> None:
        """Take a frame, if the simulator's episode is not over (then it runs idle)."""
        if index in self._outcomes:
            return
        if self._steps[index] % self._every == 0:
            self._frames[index].append(self._simulators.render_frame(index, self._size))
        self._steps[index] += 1

    def ended(self, result: EpisodeResult) -> None:
        """Note the outcome, which is shown after the frames of the last decision."""
        self._outcomes[self._tile_of[result.init_state_id]] = label(result)

    def hold(self) -> None:
        """Show the last decision, then every outcome for a while."""
        self._flush()
        self.recorder.write(lambda grid: grid.write(grid.held_frames))

    def _flush(self) -> None:
        for number in range(max(map(len, self._frames))):
            for tile, frames in enumerate(self._frames):
                if number < len(frames):
                    self._show(tile, frames[number])
                else:
                    self._finish(tile)
            self.recorder.write(GridVideo.write)
        for tile, frames in enumerate(self._frames):
            frames.clear()
            self._finish(tile)

    def _show(self, tile: int, frame: np.ndarray) -> None:
        self.recorder.write(lambda grid: grid.show(tile, frame, *self._texts[tile]))

    def _finish(self, tile: int) -> None:
        """Show the outcome once; an episode that diverged at once has no frame to show it on."""
        if tile in self._outcomes and tile not in self._finished and self._steps[tile]:
            self._finished.add(tile)
            self.recorder.write(lambda grid: grid.finish(tile, self._outcomes[tile]))
