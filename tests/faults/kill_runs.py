"""Many kills at random moments of one training run; counts what was lost, which should be nothing.

    make faults KILLS=100

What is killed, in turn: an actor (the run must go on by itself), a learner rank, the whole tree of
processes at once, and the whole tree while a checkpoint is half written. After each end of the run
its folder is examined, and it is started again. Exit code 1 if anything was lost.
"""

import argparse
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
from small import CHUNK, POLICY, SUITE
from small_run import LOOPS, actors_of

from torchrl_vla import schema
from torchrl_vla.checkpoint.files import why_refused
from torchrl_vla.metrics import read_metrics
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.lane import COMMITTED
from torchrl_vla.storage.layout import transition_layout

KINDS = ("actor", "rank", "tree", "save")
PATIENCE = 300.0
"""Seconds that a run may take until it makes progress."""
PROGRAM = Path(__file__).with_name("small_run.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
LEFTOVERS = ("torch_", "pymp-", "sem.", "psm_")


class Life:
    """The run from one start to its end.

    Args:
        folder: of the run; its output goes to a file beside it.
        words: the command.
        every: updates between two rows of its metrics.
    """

    def __init__(self, folder: Path, words: Sequence[object], every: int) -> None:
        self.folder, self.every = folder, every
        self.program = str(next(word for word in words if str(word).endswith(".py")))
        self.log = (folder.parent / "output.txt").open("a+")
        self.log.seek(0, os.SEEK_END)
        self.start_of_log = self.log.tell()
        self.pids: set[int] = set()
        self.mapped: set[Path] = set()
        self.orphans = 0
        self.process = psutil.Popen(
            [*map(str, words)],
            stdout=self.log,
            stderr=self.log,
            env=os.environ | {"TMPDIR": str(folder.parent / "tmp")},
        )
        self.before = self.half_written()
        self.wait_for_updates(3)

    def half_written(self) -> set[int]:
        """Return inodes of the checkpoints that are half written."""
        folders = (self.folder / "checkpoints").glob(".tmp-step-*")
        return {path.stat().st_ino for path in folders}

    def updates(self) -> int:
        """Return how far the run is."""
        try:
            rows = read_metrics(self.folder)
        except FileNotFoundError:
            return 0
        return rows[-1]["update"] if rows else 0

    def saves_now(self) -> bool:
        """Whether a checkpoint of this life is half written."""
        try:
            return bool(self.half_written() - self.before)
        except FileNotFoundError:  # it was renamed at this moment
            return False

    def wait_for_updates(self, rows: int) -> None:
        """Wait until ``rows`` more rows of metrics are there, or the run is over.

        Raises:
            RuntimeError: the run ended with an error, or it makes no progress.
        """
        goal, deadline = self.updates() + rows * self.every, time.monotonic() + PATIENCE
        while self.updates() < goal and (code := self.process.poll()) != 0:
            if code is not None or time.monotonic() > deadline:
                if self.process.is_running():
                    self.kill("tree")
                raise RuntimeError(f"no progress beyond update {self.updates()}:\n{self.said()}")
            time.sleep(0.05)

    def said(self) -> str:
        """Return the end of what this life printed."""
        self.log.seek(self.start_of_log)
        return self.log.read()[-4000:]

    def ranks(self) -> list[psutil.Process]:
        """Return the learner ranks."""
        children = [p for p in self.process.children() if self.program in p.cmdline()]
        return children or [self.process]

    def kill(self, kind: str) -> bool:
        """Kill something now; returns whether the run must go on."""
        ranks = self.ranks()
        if kind == "actor":
            random.choice(actors_of(random.choice(ranks))).kill()
            self.wait_for_updates(2)
            return True
        tree = [self.process, *self.process.children(recursive=True)]
        self.pids = {process.pid for process in tree}
        self.mapped = {path for process in tree for path in shared_files(process)}
        while kind == "save" and not self.saves_now() and self.process.poll() is None:
            time.sleep(0.0005)
        for victim in [random.choice(ranks)] if kind == "rank" else tree:
            victim.send_signal(signal.SIGKILL)
        self.process.wait()
        _, alive = psutil.wait_procs(tree, timeout=PATIENCE)
        for orphan in alive:
            orphan.kill()
        self.orphans = len(alive)
        return False


def examine(folder: Path, found: Counter) -> None:
    """Look at what an end of the run has left behind, and add it up in ``found``."""
    saved = sorted((folder / "checkpoints").glob("step-*"))
    reasons = [why_refused(path, None) for path in saved]
    found["checkpoints marked complete"] += len(saved)
    found["checkpoints loadable"] += reasons.count(None)
    found["partial checkpoints"] += len(list((folder / "checkpoints").glob(".tmp-step-*")))
    steps = [row["update"] for row in read_metrics(folder)]
    found["rows of metrics repeated"] += len(steps) - len(set(steps))
    policy = POLICY(SUITE.meta, head="gaussian")
    optional = [f.key for f in schema.SCHEMA if not f.required and f.key in policy.out_keys]
    for path in sorted((folder / "replay").glob("rank-*")):
        layout = transition_layout(SUITE.meta, CHUNK, optional)
        before = JournalStorage.attached(path, layout).rings.header[:, COMMITTED].sum()
        storage = JournalStorage(path, 200, layout, lanes=2, existing="reuse", verify=True)
        found["replay rows committed"] += int(before)
        found["replay rows found"] += int(storage.rings.header[:, COMMITTED].sum())
        found["replay rows damaged"] += storage.lost_rows


def shared_files(process: psutil.Process) -> set[Path]:
    """Return the files in /dev/shm that a process has mapped, named semaphores among them."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # gone meanwhile
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
            found.update(Path(word) for word in line.split() if word.startswith("/dev/shm/"))
    return found


def leftovers(temporary: Path, pids: set[int], mapped: set[Path]) -> int:
    """Count what processes have left in shared memory and in their own TMPDIR.

    Args:
        temporary: their TMPDIR.
        pids: their ids, which are part of names in shared memory.
        mapped: what they had mapped from there.
    """
    named = Path("/dev/shm").iterdir()
    shared = {path for path in named if any(f"_{pid}_" in f"{path.name}_" for pid in pids)}
    shared |= {path for path in mapped if path.exists()}
    return len(shared) + len([p for p in temporary.iterdir() if p.name.startswith(LEFTOVERS)])


def resumed_where_saved(life: Life, newest: Path | None) -> bool:
    """Whether a life began at the newest complete checkpoint of the one before."""
    said = re.search(r"resumed (step-\d+)", life.said())
    return (said.group(1) if said else None) == (newest.name if newest else None)


def main() -> int:
    """Kill, examine, start again; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--algorithm", choices=list(LOOPS), default="sac")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)
    found, started = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kill-runs-") as root:
        folder, temporary, life = Path(root) / "run", Path(root) / "tmp", None
        temporary.mkdir()
        launcher = (*TORCHRUN, f"--nproc-per-node={args.ranks}")
        words = (*launcher[: None if args.ranks > 1 else 1], PROGRAM, args.algorithm, folder, 10**9)
        start = partial(Life, folder, words, LOOPS[args.algorithm][2])
        for number in range(args.kills):
            if life is None:
                life = start()
                found["starts"] += 1
            kind = KINDS[number % len(KINDS)]
            time.sleep(random.uniform(0, 1.0))
            found[f"kills: {kind}"] += 1
            if life.kill(kind):
                continue
            found["orphans"] += life.orphans
            found["leftovers"] += leftovers(temporary, life.pids, life.mapped)
            examine(folder, found)
            newest = max((folder / "checkpoints").glob("step-*"), default=None)
            if number + 1 < args.kills:
                life = start()
                found["starts"] += 1
                found["resumes elsewhere"] += not resumed_where_saved(life, newest)
        found["updates in the end"] = life.updates()
        if life.process.is_running():
            life.kill("tree")
    print(f"{args.kills} kills in {time.monotonic() - started:.0f} s, {args.algorithm}:")
    for name, count in found.items():
        print(f"  {name:34s}{count}")
    lost = ("orphans", "leftovers", "rows of metrics repeated", "replay rows damaged")
    equal = (
        found["checkpoints marked complete"] == found["checkpoints loadable"]
        and found["replay rows committed"] == found["replay rows found"]
    )
    nothing = equal and not any(found[name] for name in (*lost, "resumes elsewhere"))
    print("nothing was lost" if nothing else "SOMETHING WAS LOST")
    return 0 if nothing else 1


if __name__ == "__main__":
    sys.exit(main())
