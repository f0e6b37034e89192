"""Evaluation episodes as one mp4: instruction, outcome, and what the policy expects to get."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import av
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from torchrl_vla import schema
from torchrl_vla.envs.simulator import Simulators
from torchrl_vla.evaluate.episodes import EpisodeResult, run_episodes
from torchrl_vla.video import EpisodeVideo, Outcome

VALUE = "state_value"
LABELS: dict[str, Outcome] = {"success": "SUCCESS", "time out": "TIME OUT"}
Judge = Callable[[TensorDictBase], str]


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


class _Recorder:
    """Writes frames until the writer fails; then says so once and lets the episodes go on."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps = path, fps
        self._video: EpisodeVideo | None = None
        self._guard(self._open)

    def _open(self) -> None:
        self._video = EpisodeVideo(self._path, self._fps)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, RuntimeError, ValueError, av.FFmpegError) as error:
            warnings.warn(
                f"no video at {self._path}: {type(error).__name__}: {error}", stacklevel=2
            )
            self.discard()

    def add(self, frame: np.ndarray, instruction: str, note: str) -> None:
        if (video := self._video) is not None:
            self._guard(lambda: video.add(frame, instruction, note))

    def finish(self, outcome: Outcome) -> None:
        if (video := self._video) is not None:
            self._guard(lambda: video.finish(outcome))

    def close(self) -> None:
        if (video := self._video) is not None:
            self._guard(video.close)

    def discard(self) -> None:
        video, self._video = self._video, None
        if video is not None:
            video.discard()


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
    recorder = _Recorder(path, meta.control_hz)
    note = ""

    def judged(_: int, decided: TensorDictBase) -> None:
        nonlocal note
        note = judge(decided)

    def add_frame(index: int) -> None:
        instruction = meta.instructions[simulators.task_id(index)]
        recorder.add(simulators.render_frame(index, size), instruction, note)

    try:
        results = run_episodes(
            policy,
            simulators,
            init_state_ids,
            chunk_size=chunk_size,
            on_decision=judged,
            on_control_step=add_frame,
            on_episode=lambda result: recorder.finish(LABELS.get(result.outcome, "FAILURE")),
        )
        recorder.close()
    finally:
        recorder.discard()  # what was closed is kept
    return results
