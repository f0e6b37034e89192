"""Evaluation episodes: a fixed list of initial states, each run once, exact decisions.

Every decision is computed alone (a batched matrix product may round differently per batch size,
and contact physics turns the last bit into another outcome), and each decision's random numbers, if
the decode needs any, come from (seed, initial state, decision) alone. Training is left as it was:
random generators, train/eval flags and threads are put back, also after a failure.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla import schema
from torchrl_vla.envs.chunked import ChunkedEnv, FixedInitStates
from torchrl_vla.envs.simulator import Simulators, SuiteMeta
from torchrl_vla.topology import Topology

Perturbation = Literal["none", "random_instruction", "wrong_instruction", "grey_image"]
OnDecision = Callable[[int, TensorDictBase], None]


@dataclass(frozen=True)
class EpisodeResult:
    """Outcome of one evaluation episode."""

    init_state_id: int
    task_id: int
    success: bool
    outcome: str
    """``"success"``, ``"failure"``, ``"time out"`` (all control steps used, or the suite cut the
    episode off) or ``"sim error"``."""
    env_steps: int
    seed: int = 0
    """Of the decode's random numbers."""
    trace: str = ""
    """Hash of every action and of the proprioception after it, to the bit: equal traces are equal
    episodes."""


def perturb(
    td: TensorDictBase, meta: SuiteMeta, kind: Perturbation, generator: torch.Generator
) -> TensorDictBase:
    """Return what the policy is shown under a perturbation, leaving ``td`` as it is.

    ``"random_instruction"`` re-draws the instruction at every decision among those of the same task
    (in the tabletop suite: a random colour word, right in one of three decisions, so that a policy
    that listens still solves up to a third); ``"wrong_instruction"`` gives another one of them for
    the whole episode, or of another task if this one has no other; ``"grey_image"`` shows mid-grey.

    Raises:
        ValueError: an unknown ``kind``, or a wrong instruction where the suite has only one.
    """
    if kind == "none":
        return td
    shown = td.clone(recurse=False)
    if kind == "grey_image":
        shown["observation"] = td["observation"].clone(recurse=False)
        shown[schema.IMAGE] = torch.full_like(td[schema.IMAGE], 128)
        return shown
    if kind == "random_instruction":
        same = _same_task(meta, int(td[schema.TASK_ID]))
        pick = same[int(torch.randint(len(same), (1,), generator=generator))]
        shown[schema.TASK_ID] = torch.full_like(td[schema.TASK_ID], pick)
        return shown
    if kind == "wrong_instruction":
        pick = _other_instruction(meta, int(td[schema.TASK_ID]), int(td[schema.INIT_STATE_ID]))
        shown[schema.TASK_ID] = torch.full_like(td[schema.TASK_ID], pick)
        return shown
    raise ValueError(f"perturbation {kind!r} is unknown; use one of {get_args(Perturbation)}")


def _same_task(meta: SuiteMeta, task_id: int) -> list[int]:
    """Return the instructions of a task, the given one among them."""
    return [i for i, name in enumerate(meta.task_names) if name == meta.task_names[task_id]]


def _other_instruction(meta: SuiteMeta, task_id: int, init_state_id: int) -> int:
    """Return an instruction that is not ``task_id``, of the same task if it has several."""
    same = [i for i in _same_task(meta, task_id) if i != task_id]
    others = same or [i for i in range(len(meta.instructions)) if i != task_id]
    if not others:
        raise ValueError(
            f"suite {meta.name} has one instruction, {meta.instructions[0]!r}; "
            "perturbation=wrong_instruction needs another"
        )
    return others[decision_seed(0, init_state_id, 0) % len(others)]


def decision_seed(seed: int, init_state_id: int, decision: int) -> int:
    """Return the generator seed of one decision, in 0..2^63 - 1: a hash of the three numbers."""
    digest = hashlib.sha256(f"{seed}/{init_state_id}/{decision}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def decide(
    policy: nn.Module, row: TensorDictBase, meta: SuiteMeta, kind: Perturbation, seed: int = 0
) -> TensorDictBase:
    """Return what ``policy`` writes in the one state ``row``, batch ``[1]``: the chunk at least."""
    number = decision_seed(seed, int(row[schema.INIT_STATE_ID]), int(row[schema.DECISION]))
    generator = torch.Generator().manual_seed(number)
    shown = perturb(row, meta, kind, generator)
    with torch.no_grad():
        torch.manual_seed(number)
        return policy(shown)


@contextmanager
def undisturbed(policy: nn.Module) -> Iterator[None]:
    """Evaluate inside; afterwards nothing of the training process has changed, failed or not.

    Inside, every submodule is in eval mode, exploration is off and torch computes on one thread
    (sums split over threads round differently, and one row gains nothing). Afterwards each
    submodule's own train/eval flag, the number of threads and the states of the random generators
    of torch (CPU and CUDA), NumPy and Python are what they were.
    """
    flags = [(module, module.training) for module in policy.modules()]
    threads = torch.get_num_threads()
    numpy_state, python_state = np.random.get_state(), random.getstate()
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    try:
        policy.eval()
        torch.set_num_threads(1)
        with (
            torch.random.fork_rng(devices=cuda),
            set_exploration_type(ExplorationType.DETERMINISTIC),
        ):
            yield
    finally:
        for module, training in flags:
            module.training = training
        torch.set_num_threads(threads)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@dataclass
class _Tally:
    """What is known of an episode that still runs."""

    env_steps: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def add(self, row: TensorDictBase) -> None:
        steps = int(row[schema.NUM_EXECUTED])
        self.env_steps += steps
        self.hash.update(row[schema.CHUNK][:steps].numpy().tobytes())
        self.hash.update(row["next", *schema.STATE].numpy().tobytes())


def run_episodes(
    policy: nn.Module,
    simulators: Simulators,
    init_state_ids: Sequence[int],
    *,
    chunk_size: int,
    seed: int = 0,
    perturbation: Perturbation = "none",
    on_decision: OnDecision | None = None,
    on_control_step: Callable[[int], None] | None = None,
    on_episode: Callable[[EpisodeResult], None] | None = None,
) -> list[EpisodeResult]:
    """Run ``policy`` once from every initial state.

    Args:
        policy: acts with exploration off; its ``eval_decode`` says how.
        simulators: N simulators; the result does not depend on N.
        init_state_ids: where the episodes start.
        chunk_size: ``H``.
        seed: of the random numbers that a sampled decode or a perturbation draws.
        perturbation: see :func:`perturb`.
        on_decision: called before a decision is executed with the simulator's index and what the
            policy wrote, batch ``[1]``.
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
    tallies: dict[int, _Tally] = {}
    results: dict[int, EpisodeResult] = {}
    with undisturbed(policy):
        td = env.reset()
        while len(results) < len(init_state_ids):
            decided = [decide(policy, row, env.meta, perturbation, seed) for row in td.split(1)]
            if on_decision is not None:
                for index, row in enumerate(decided):
                    on_decision(index, row)
            td[schema.CHUNK] = torch.cat([row[schema.CHUNK] for row in decided])
            stepped, td = env.step_and_maybe_reset(td)
            for row in stepped.unbind(0):
                episode = int(row[schema.EPISODE_ID])
                if episode >= len(init_state_ids):
                    continue  # a simulator that had no initial state left
                tally = tallies.setdefault(episode, _Tally())
                tally.add(row)
                if bool(row[schema.DONE]):
                    results[episode] = _result(row, tally, env.max_steps, seed)
                    if on_episode is not None:
                        on_episode(results[episode])
    return [results[i] for i in range(len(init_state_ids))]


def _result(row: TensorDictBase, tally: _Tally, max_steps: int, seed: int) -> EpisodeResult:
    success = bool(row[schema.SUCCESS])
    if bool(row[schema.SIM_ERROR]):
        outcome = "sim error"
    elif success:
        outcome = "success"
    else:
        late = tally.env_steps >= max_steps or bool(row[schema.TRUNCATED])
        outcome = "time out" if late else "failure"
    return EpisodeResult(
        int(row[schema.INIT_STATE_ID]),
        int(row[schema.TASK_ID]),
        success,
        outcome,
        tally.env_steps,
        seed,
        tally.hash.hexdigest()[:16],
    )


def run_on_ranks(
    policy: nn.Module,
    simulators: Simulators,
    init_state_ids: Sequence[int],
    topology: Topology,
    **settings: Any,
) -> list[EpisodeResult]:
    """Share the initial states out over the ranks and give all results to each; collective.

    Args:
        policy, simulators, init_state_ids: as in :func:`run_episodes`; equal on all ranks.
        topology: the ranks.
        **settings: of :func:`run_episodes`.

    Returns:
        One result per id, in the order of ``init_state_ids``, whatever the number of ranks.

    Raises:
        RuntimeError: another rank failed; says which and why.
    """
    share = init_state_ids[topology.rank :: topology.world_size]

    def mine() -> list[EpisodeResult]:
        return run_episodes(policy, simulators, share, **settings) if len(share) else []

    parts = topology.gather_objects(topology.together(mine))
    out: list[EpisodeResult | None] = [None] * len(init_state_ids)
    for rank, part in enumerate(parts):
        out[rank :: topology.world_size] = part
    return out
