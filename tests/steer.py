"""A policy whose actions say who chose them, actors that run it, and what must be gone then."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from envs.counter import META, CounterSuite
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_vla import schema
from torchrl_vla.actors import ActorSettings, ServerSettings, start_actors
from torchrl_vla.storage.layout import transition_layout

CHUNK, ACTIONS = 4, 2
LAYOUT = transition_layout(META, CHUNK)


class Steer(TensorDictModuleBase):
    """Chunk = ``value`` + ``noise`` x N(0, 1), so that an action tells who chose it."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))
        self.noise = nn.Parameter(torch.zeros(1))
        self.in_keys, self.out_keys = [schema.STATE], [schema.CHUNK]

    def forward(self, td):
        noise = torch.randn(*td.batch_size, CHUNK, ACTIONS)
        td.set(schema.CHUNK, (self.value + self.noise * noise).clamp(-1, 1))
        return td


def weights(value: float, noise: float = 0.0) -> TensorDict:
    policy = TensorDict.from_module(Steer()).data
    return policy.copy().update({"value": torch.tensor([value]), "noise": torch.tensor([noise])})


def start(
    folder: Path,
    suite: CounterSuite,
    *,
    workers=2,
    envs=3,
    steps=5,
    timeout=30.0,
    max_restarts=0,
    publish="blocking",
    groups=0,
    **kwargs,
):
    """Start actors that run :class:`Steer`; ``groups`` > 0: at a policy server."""
    settings = ActorSettings(
        workers, envs, steps, timeout, max_restarts=max_restarts, publish=publish
    )
    return start_actors(
        suite,
        Steer,
        settings,
        chunk_size=CHUNK,
        gamma=0.5,
        seed=0,
        rank=0,
        folder=folder,
        server=ServerSettings("cpu", groups, Steer()) if groups else None,
        **kwargs,
    )


@contextmanager
def nothing_left():
    """Check that what was started inside has ended, except multiprocessing's own tracker."""

    def children():
        found = psutil.Process().children(recursive=True)
        return {p.pid for p in found if "resource_tracker" not in " ".join(p.cmdline())}

    before = children()
    yield
    assert not wait_until_gone(children() - before)


def wait_until_gone(pids, seconds: float = 10.0) -> set[int]:
    """Return those of ``pids`` that still run after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pids = {pid for pid in pids if psutil.pid_exists(pid) and not is_zombie(pid)}
        if not pids:
            break
        time.sleep(0.1)
    return set(pids)


def is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def start_driver(program: str, folder: Path) -> tuple[subprocess.Popen, Path]:
    """Start ``program folder`` with a folder of its own for temporary files; return both."""
    temporary = folder / "tmp"
    temporary.mkdir()
    driver = subprocess.Popen(
        [sys.executable, program, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    return driver, temporary


def check_no_leftovers(temporary: Path, pids: set[int]) -> None:
    """Check that processes that are gone left no file in ``temporary`` or in shared memory."""
    assert not list(temporary.iterdir())
    shared = [p.name for p in Path("/dev/shm").iterdir()]
    assert not [name for name in shared if any(str(pid) in name for pid in pids)]
