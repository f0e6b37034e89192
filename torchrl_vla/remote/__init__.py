"""Actors on other hosts: they join a learner rank over TCP and write its replay.

What the room is for: letting actors that nobody here started come, go and come back, and getting
each of their batches into the replay once. What it does not do: start them (``launch/actor.py``,
a scheduler), encrypt what they send, or serve on-policy algorithms, whose rounds need every actor.
"""

from torchrl_vla.remote.actor import serve
from torchrl_vla.remote.server import RemoteActors, start_listening
from torchrl_vla.remote.settings import (
    Listening,
    find_learner,
    listening,
    read_secret,
    split_address,
)
from torchrl_vla.remote.wire import RefusedError, WireError

__all__ = [
    "Listening",
    "RefusedError",
    "RemoteActors",
    "WireError",
    "find_learner",
    "listening",
    "read_secret",
    "serve",
    "split_address",
    "start_listening",
]
