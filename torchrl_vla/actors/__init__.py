"""Actors of a rank: collectors in child processes, fed with weights, watched, replaced.

What the room is for: running TorchRL collectors around a chunked environment and a copy of the
policy in processes of their own, publishing weights to them, handing their batches to the loop, and
replacing a worker that dies, hangs, raises or delivers numbers that are not finite. What it does
not do: decide when to collect or what to do with the data (loops), or keep the replay (storage).
"""

from torchrl_vla.actors.behaviour import Behaviour
from torchrl_vla.actors.board import ActorCounts
from torchrl_vla.actors.copies import load_full_weights
from torchrl_vla.actors.environment import (
    actor_streams,
    check_finite,
    make_actor_env,
    to_transitions,
)
from torchrl_vla.actors.server import ServerSettings
from torchrl_vla.actors.settings import ActorSettings, start_actors
from torchrl_vla.actors.supervision import WorkerError
from torchrl_vla.actors.worker import die_with_parent, make_collector
from torchrl_vla.actors.workers import Actors

__all__ = [
    "ActorCounts",
    "ActorSettings",
    "Actors",
    "Behaviour",
    "ServerSettings",
    "WorkerError",
    "actor_streams",
    "check_finite",
    "die_with_parent",
    "load_full_weights",
    "make_actor_env",
    "make_collector",
    "start_actors",
    "to_transitions",
]
