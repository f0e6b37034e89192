"""Collect for a learner elsewhere: ``python launch/actor.py learner=HOST:PORT secret_file=FILE``.

The learner runs with ``topology=remote``. Where folders are shared, ``learner=`` may be the rank's
``RUN_DIR/actors/rank-R/remote.json``, which says where it listens, also after it has moved. Start
actors before or after it, and as many as the run has places (``algo.actors.num_workers`` per rank);
end them whenever you like.

Exit codes: 0 the run is over, or the actor was asked to stop and has delivered what it had; 70 its
simulators or its policy hung; anything else is an error.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchrl_vla.envs.gl import choose_backend

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # TorchRL's own log
try:
    choose_backend()  # before anything imports mujoco
except RuntimeError as error:
    sys.exit(str(error))

import hydra
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig
from tensordict.nn import TensorDictModuleBase

from torchrl_vla.envs.simulator import Suite
from torchrl_vla.remote import RefusedError, find_learner, read_secret, serve

ROOMS = ("torchrl_vla.envs.", "torchrl_vla.policies.")
"""What a description from the network may name."""


def check_description(node: Any, where: str = "description") -> None:
    """Check that a description names only what actors are made of.

    Raises:
        ValueError: a target is defined elsewhere, or a text would be filled in on this host.
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == "_target_":
                _check_target(value, where)
            check_description(value, f"{where}.{key}")
    elif isinstance(node, list):
        for value in node:
            check_description(value, where)
    elif isinstance(node, str) and "${" in node:
        raise ValueError(f"{where} is {node!r}: a learner sends values, not interpolations")


def _check_target(name: Any, where: str) -> None:
    # The name alone proves nothing: torchrl_vla.envs.gl.os.system begins well, too.
    home = ""
    if isinstance(name, str) and name.startswith(ROOMS):
        home = f"{getattr(get_object(name), '__module__', '')}."
    if not home.startswith(ROOMS):
        raise ValueError(
            f"{where} names {name!r}; an actor builds only what {' and '.join(ROOMS)}* define"
        )


def build(description: Mapping[str, Any]) -> tuple[Suite, Callable[[], TensorDictModuleBase]]:
    """Return suite and policy maker of a learner's description.

    Raises:
        ValueError: it names something else.
    """
    check_description(description)
    suite, make_policy = instantiate(description["env"]), instantiate(description["policy"])
    return suite, lambda: make_policy(suite.meta)


@hydra.main(version_base="1.3", config_path="../conf", config_name="actor")
def main(cfg: DictConfig) -> None:
    """Join, collect, leave."""
    address, secret = find_learner(cfg.learner), read_secret(cfg.secret_file)
    name = cfg.name or f"{socket.gethostname()}-{os.getpid()}"
    try:
        rows, lost = serve(address, secret, name, build)
    except RefusedError as refusal:
        sys.exit(f"{cfg.learner} refuses this actor: {refusal} (secret_file={cfg.secret_file})")
    print(f"{name} delivered {rows} rows", flush=True)
    if lost:
        sys.exit(f"{lost} batches could not be delivered to {cfg.learner}")


if __name__ == "__main__":
    main()
