"""Success rates one can trust: a fixed list of initial states, each run once, exact decisions.

The result is a pure function of (policy, initial states, settings). It does not depend on how many
simulators run side by side, on how fast a policy ends its episodes, or on the number of ranks:
every decision is computed alone (a batched matrix product may round differently per batch size,
and contact physics turns the last bit into another outcome), and each episode's random numbers, if
its decode needs any, come from its own seed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla import schema
from torchrl_vla.envs.chunked import ChunkedEnv, FixedInitStates
from torchrl_vla.envs.simulator import Simulators, SuiteMeta
from torchrl_vla.metrics import wilson_interval
from torchrl_vla.video import EpisodeVideo

Perturbation = Literal["none", "random_instruction", "grey_image"]


@dataclass(frozen=True)
class EpisodeResult:
    """Outcome of one evaluation episode."""

    init_state_id: int
    task_id: int
    success: bool
    outcome: str
    """``"success"``, ``"failure"``, ``"time out"`` (all control steps used) or ``"sim error"``."""
    env_steps: int


def perturb(
    td: TensorDictBase, meta: SuiteMeta, kind: Perturbation, generator: torch.Generator
) -> TensorDictBase:
    """Return what the policy is shown under a perturbation, leaving ``td`` as it is.

    ``"random_instruction"`` re-draws the instruction at every decision among those of the same task
    (in the tabletop suite: a random colour word); ``"grey_image"`` shows mid-grey.
    """
    if kind == "none":
        return td
    shown = td.clone(recurse=False)
    if kind == "grey_image":
        shown["observation"] = td["observation"].clone(recurse=False)
        shown[schema.IMAGE] = torch.full_like(td[schema.IMAGE], 128)
        return shown
    if kind == "random_instruction":
        name = meta.task_names[int(td[schema.TASK_ID])]
        same = [i for i, other in enumerate(meta.task_names) if other == name]
        pick = same[int(torch.randint(len(same), (1,), generator=generator))]
        shown[schema.TASK_ID] = torch.full_like(td[schema.TASK_ID], pick)
        return shown
    raise ValueError(
        f"perturbation {kind!r} is unknown; use 'none', 'random_instruction' or 'grey_image'"
    )


def decide(
    policy: nn.Module, row: TensorDictBase, meta: SuiteMeta, kind: Perturbation
) -> torch.Tensor:
    """Return the chunk ``[1, H, A]`` that ``policy`` chooses in the one state ``row`` ``[1]``."""
    seed = int(row[schema.INIT_STATE_ID]) * 1009 + int(row[schema.DECISION])
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        return policy(perturb(row, meta, kind, generator))[schema.CHUNK]


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: sums split over threads round differently, and one row gains nothing.

    The number of threads of before is put back at the end.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_episodes(
    policy: nn.Module,
    simulators: Simulators,
    init_state_ids: Sequence[int],
    *,
    chunk_size: int,
    perturbation: Perturbation = "none",
    on_control_step: Callable[[int], None] | None = None,
    on_episode: Callable[[EpisodeResult], None] | None = None,
) -> list[EpisodeResult]:
    """Run ``policy`` once from every initial state.

    Args:
        policy: acts with exploration off; its ``eval_decode`` says how.
        simulators: N simulators; the result does not depend on N.
        init_state_ids: where the episodes start.
        chunk_size: ``H``.
        perturbation: see :func:`perturb`.
        on_control_step: passed to the environment (videos).
        on_episode: called when an episode ends.

    Returns:
        One result per id, in the order of ``init_state_ids``.
    """
    env = ChunkedEnv(
        simulators,
        FixedInitStates(list(init_state_ids)),
        chunk_size=chunk_size,
        on_control_step=on_control_step,
    )
    steps: dict[int, int] = {}
    results: dict[int, EpisodeResult] = {}
    with set_exploration_type(ExplorationType.DETERMINISTIC), one_thread():
        td = env.reset()
        while len(results) < len(init_state_ids):
            chunks = [decide(policy, row, env.meta, perturbation) for row in td.split(1)]
            td[schema.CHUNK] = torch.cat(chunks)
            stepped, td = env.step_and_maybe_reset(td)
            for row in stepped.unbind(0):
                episode = int(row[schema.EPISODE_ID])
                if episode >= len(init_state_ids):
                    continue  # a simulator that had no initial state left
                steps[episode] = steps.get(episode, 0) + int(row[schema.NUM_EXECUTED])
                if bool(row[schema.DONE]):
                    results[episode] = _result(row, steps[episode], env.max_steps)
                    if on_episode is not None:
                        on_episode(results[episode])
    return [results[i] for i in range(len(init_state_ids))]


def _result(row: TensorDictBase, env_steps: int, max_steps: int) -> EpisodeResult:
    success = bool(row[schema.SUCCESS])
    if bool(row[schema.SIM_ERROR]):
        outcome = "sim error"
    elif success:
        outcome = "success"
    else:
        outcome = "failure" if env_steps < max_steps else "time out"
    return EpisodeResult(
        int(row[schema.INIT_STATE_ID]), int(row[schema.TASK_ID]), success, outcome, env_steps
    )


def summarise(results: Sequence[EpisodeResult], meta: SuiteMeta) -> dict[str, Any]:
    """Return success rates with 95 % Wilson intervals, in all, per task and per instruction.

    Returns:
        ``success_rate``, ``successes``, ``episodes``, ``interval``, ``per_task`` (the same per task
        name), ``per_instruction`` and ``outcomes`` (count of each outcome). A diverged simulation
        counts as a failure and is visible in ``outcomes``.
    """

    def rate(part: Sequence[EpisodeResult]) -> dict[str, Any]:
        successes = sum(result.success for result in part)
        return {
            "success_rate": successes / len(part),
            "successes": successes,
            "episodes": len(part),
            "interval": list(wilson_interval(successes, len(part))),
        }

    def split(names: Sequence[str]) -> dict[str, Any]:
        parts: dict[str, list[EpisodeResult]] = {}
        for result in results:
            parts.setdefault(names[result.task_id], []).append(result)
        return {name: rate(part) for name, part in sorted(parts.items())}

    outcomes = [result.outcome for result in results]
    return rate(results) | {
        "per_task": split(meta.task_names),
        "per_instruction": split(meta.instructions),
        "outcomes": {name: outcomes.count(name) for name in sorted(set(outcomes))},
    }


def fingerprint() -> dict[str, str]:
    """Return versions that a result depends on."""
    packages = ("torch", "torchrl", "tensordict", "mujoco", "torchrl_vla")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "gl": os.environ.get("MUJOCO_GL", "unset"),
    }


def as_rows(results: Sequence[EpisodeResult]) -> list[dict[str, Any]]:
    """Return the episodes as plain dicts, for JSON."""
    return [asdict(result) for result in results]


def film(
    policy: nn.Module,
    simulators: Simulators,
    init_state_ids: Sequence[int],
    path: Path,
    *,
    chunk_size: int,
    size: int = 320,
) -> list[EpisodeResult]:
    """Write the episodes as one mp4 with instruction and outcome drawn in.

    ``simulators`` must hold one simulator that offers ``render_frame(index, size)``.

    Raises:
        ValueError: there are several simulators, whose frames would mix.
    """
    if simulators.num_envs != 1:
        raise ValueError(f"{simulators.num_envs} simulators given; a film needs exactly one")
    meta = simulators.meta
    with EpisodeVideo(path, fps=meta.control_hz) as video:

        def add_frame(index: int) -> None:
            frame = simulators.render_frame(index, size)
            video.add(frame, instruction=meta.instructions[simulators.task_id(index)])

        def end(result: EpisodeResult) -> None:
            label = {"success": "SUCCESS", "time out": "TIME OUT"}.get(result.outcome, "FAILURE")
            video.finish(label)

        return run_episodes(
            policy,
            simulators,
            init_state_ids,
            chunk_size=chunk_size,
            on_control_step=add_frame,
            on_episode=end,
        )
