"""What an actor process on another host does: join, build, collect, until the run is over."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase

from torchrl_vla.actors import (
    Behaviour,
    check_finite,
    make_actor_env,
    make_collector,
    to_transitions,
)
from torchrl_vla.envs.chunked import ChunkedEnv
from torchrl_vla.envs.simulator import Suite
from torchrl_vla.remote.link import Link

_LOG = logging.getLogger(__name__)
Build = Callable[[Mapping[str, Any]], tuple[Suite, Callable[[], TensorDictModuleBase]]]
_FAREWELL_SECONDS = 20.0


def serve(
    address: tuple[str, int] | Path, secret: bytes, name: str, build: Build
) -> tuple[int, int]:
    """Collect for the learner rank at ``address`` until the run is over; the process's main part.

    SIGTERM and SIGINT let the actor deliver what it has and take leave.

    Args:
        address: host and port of the rank, or the file of its run that has them
            (``actors/rank-R/remote.json``), which need not exist yet.
        secret: of the job.
        name: of this actor, for people.
        build: makes suite and policy from the run's description.

    Returns:
        Rows that were delivered, and batches that could not be.

    Raises:
        RefusedError: the learner refuses this actor.
        ValueError: the file is there and names no address.
    """
    torch.set_num_threads(1)
    link = Link(address, secret, name)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: link.leave())
    link.start()
    while (plan := link.plan()) is not None:
        _LOG.warning("actor %s has place %d of %s", name, plan["place"], link.learner)
        _collect(link, plan, build)
    return link.finish(_FAREWELL_SECONDS)


def _collect(link: Link, plan: dict[str, Any], build: Build) -> None:
    """Collect for one plan until there is another one or none."""

    def on_step(env: ChunkedEnv, env_steps: int) -> None:
        link.heartbeat(env.init_states.position)

    torch.manual_seed(plan["noise"])
    suite, make_policy = build(plan["description"])
    env = make_actor_env(
        suite,
        num_envs=plan["num_envs"],
        chunk_size=plan["chunk_size"],
        gamma=plan["gamma"],
        streams=[plan["stream"]],
        group_size=plan["group_size"],
        worker=0,
        position=plan["position"],
        on_step=on_step,
    )
    policy = make_policy()
    weights = TensorDict.from_module(policy).data
    collector = make_collector(env, Behaviour(policy, link), plan["decisions_per_env"])
    batches = iter(collector)
    link.begin(sum(leaf.nbytes for leaf in weights.values(True, True)))
    while (term := link.wait_for_credit(plan)) is not None:
        batch = next(batches)
        check_finite(batch)
        link.put(to_transitions(batch), term)
    collector.shutdown()
