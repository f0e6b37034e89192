"""A small training run as a program for faults: real actors, real saves, any number of ranks.

    python small_run.py ALGORITHM FOLDER UPDATES [FAULT ROW RANK]

It resumes what is in FOLDER. When row ROW of the metrics has been written for the first time, rank
RANK does FAULT to itself: ``kill`` (SIGKILL), ``stop`` (SIGUSR1), ``worker`` (SIGKILL to one of
its actors) or ``remove`` (its folder). Every rank writes ``rank-R.json`` at the end.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

import psutil
from small import PPO, arguments, make_run
from test_off_policy_loop import small_settings

from torchrl_vla import topology as topo
from torchrl_vla.actors import ActorSettings, die_with_parent
from torchrl_vla.loops import off_policy, on_policy
from torchrl_vla.loops.plans import CheckpointPlan
from torchrl_vla.loops.run import Run
from torchrl_vla.signals import RESUME_ME, StopSignals

OFTEN = {"max_restarts": 10**6}
LOOPS = {
    "ppo": (on_policy.train, partial(arguments, PPO, actors=ActorSettings(2, 4, 3, **OFTEN)), 6),
    "sac": (off_policy.train, partial(small_settings, actors=ActorSettings(2, 2, 3, **OFTEN)), 2),
}
"""Loop, its settings, and the updates between two rows of metrics."""


def actors_of(rank: psutil.Process) -> list[psutil.Process]:
    """Return the living actor processes that a rank has started."""
    found = []
    for process in rank.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, or gone meanwhile
            if any("spawn_main" in word for word in process.cmdline()):
                found.append(process)
    return found


def do_fault(run: Run, fault: str, update: int) -> None:
    """Let ``run`` do ``fault`` to itself after ``update`` updates, once in its folder."""
    record, done = run.record, run.folder / "fault-done"

    def record_and_fail(metrics: dict) -> None:
        record(metrics)
        if run.counters["updates"] < update or done.exists():
            return
        done.touch()
        myself = psutil.Process()
        if fault == "worker":
            actors_of(myself)[-1].kill()
        elif fault == "remove":
            shutil.rmtree(run.folder)
        else:
            myself.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGUSR1}[fault])

    run.record = record_and_fail


def main(algorithm: str, folder: Path, updates: int, fault: str, row: int, rank: int) -> int:
    """Train; returns the exit code."""
    loop, settings, every = LOOPS[algorithm]
    if topo.under_torchrun():
        die_with_parent(os.getppid())
    with StopSignals() as stop:
        ranks = topo.start("cpu")
        resume = ranks.broadcast_object((folder / "checkpoints").exists())
        saves = CheckpointPlan(every_minutes=None, every_updates=2 * every)
        run = make_run(folder, ranks, updates=updates, run={"saves": saves})
        run.stop_asked = stop.asked
        if ranks.rank == rank:
            do_fault(run, fault, row * every)
        loop(run, **(settings() | {"resume": resume}))
        facts = {"counters": run.counters, "interrupted": run.interrupted, "pid": os.getpid()}
        (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(facts))
        ranks.stop()
    return RESUME_ME if run.interrupted else 0


if __name__ == "__main__":
    name, where, budget, *rest = sys.argv[1:]
    what, at, who = rest or ("none", "0", "-1")
    sys.exit(main(name, Path(where), int(budget), what, int(at), int(who)))
