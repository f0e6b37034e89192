"""Training whose actors are on other hosts, for many minutes: they are killed, cut off and added.

    make remote-soak MINUTES=30

Runs ``launch/train.py algo=sac topology=remote`` and ``launch/actor.py`` processes, each behind a
relay of its own. After a tenth of the time, the baseline, something happens to a random actor
every few seconds: SIGKILL, a connection that is reset, a cable that is out for up to 40 s (the
learner gives up a silent actor after 15 s), a new actor, one that is asked to leave. Always one
actor is left alone, so that there is data.

At the end it compares, row by row, what the learner confirmed to its actors with what is in the
replay, and looks for the longest time that the learner stood still. Exit code 1 if a confirmed row
is missing, a row is there twice or was never sent, or the learner waited for actors for more than
5 s at a time (and more than twice as long as in the baseline, on a machine that is too slow).
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from remote_network import free_port
from remote_tap import Row, Tap
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.metrics import ACTORS_REMOTE, WAIT_ACTORS, read_metrics
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.layout import Layout

LAUNCH = Path(__file__).parents[2] / "launch"
PLACES, ENVS, DECISIONS = 4, 4, 8
ROWS_PER_SECOND = 300
"""More than come; the replay must not forget any."""
MOST_SECONDS = 5.0
DARK_SECONDS = (2.0, 40.0)
KINDS = ("killed", "connection reset", "unplugged", "asked to leave", "added")
LEARNER = (
    "algo=sac", "topology=remote", "logger.display=false", "budget.minutes=null",
    "budget.env_steps=null", "budget.updates=1000000000", "evaluation.every_minutes=1e6",
    "evaluation.episodes=8", "evaluation.final_episodes=8", "evaluation.videos=0",
    "checkpoint.every_minutes=2", "checkpoint.asynchronous=true",
    f"algo.actors.num_workers={PLACES}", f"algo.actors.envs_per_worker={ENVS}",
    f"algo.actors.decisions_per_env={DECISIONS}", "algo.actors.timeout=15",
    "algo.replay.min_decisions=256", "algo.replay.demonstration_episodes=8",
    f"algo.pace.slack_decisions={2 * PLACES * ENVS * DECISIONS}", "algo.pace.publish_updates=5",
    "algo.pace.warm_up_updates=0",
)  # fmt: skip


@dataclass
class Actor:
    """An actor process and the relay that it comes through."""

    name: str
    process: subprocess.Popen
    tap: Tap
    output: Path
    dark_until: float = 0.0
    asked: bool = False

    def ask_to_leave(self) -> None:
        """Ask once: a second signal ends a process at once."""
        if not self.asked:
            self.process.terminate()
        self.asked = True

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


@dataclass
class Soak:
    """A learner, the actors that were started for it, and what was done to them."""

    folder: Path
    actors: list[Actor] = field(default_factory=list)
    done: Counter = field(default_factory=Counter)

    def start_learner(self, rows: int) -> None:
        self.secret = self.folder / "secret"
        self.secret.touch(0o600)
        self.secret.write_text(os.urandom(32).hex())
        self.address = ("127.0.0.1", free_port())
        self.run = self.folder / "run"
        words = (
            *LEARNER, f"run_dir={self.run}", f"algo.replay.capacity={rows}",
            f"topology.listen=127.0.0.1:{self.address[1]}", f"topology.secret_file={self.secret}",
        )  # fmt: skip
        self.learner = self._start("train.py", words, self.folder / "learner.txt")

    def _start(self, program: str, words: tuple[str, ...], output: Path) -> subprocess.Popen:
        with output.open("w") as file:
            command = [sys.executable, str(LAUNCH / program), *words]
            return subprocess.Popen(command, stdout=file, stderr=file)

    def check_learner(self) -> None:
        if self.learner.poll() is not None:
            said = (self.folder / "learner.txt").read_text()[-4000:]
            raise RuntimeError(f"the learner ended with {self.learner.returncode}:\n{said}")

    def add(self) -> None:
        """Start one more actor; there may be more of them than places."""
        name, tap = f"a{len(self.actors)}", Tap(self.address)
        words = (
            f"learner={tap.address[0]}:{tap.address[1]}", f"secret_file={self.secret}",
            f"name={name}",
        )  # fmt: skip
        output = self.folder / f"{name}.txt"
        self.actors.append(Actor(name, self._start("actor.py", words, output), tap, output))

    @property
    def living(self) -> list[Actor]:
        return [actor for actor in self.actors if actor.alive]

    def working(self) -> list[Actor]:
        """Return the actors that have delivered something and are not cut off."""
        return [actor for actor in self.living if actor.tap.plugged and actor.tap.confirmed]

    def disturb(self) -> None:
        """Do something to a random actor, but leave one that works alone."""
        kind = random.choice(KINDS) if len(self.living) >= PLACES else "added"
        if kind == "added":
            if len(self.living) < PLACES + 2:
                self.done[kind] += 1
                self.add()
            return
        spared = self.working()[:1]
        victims = [a for a in self.living if a not in spared and a.tap.plugged]
        if not spared or not victims:
            return
        victim = random.choice(victims)
        self.done[kind] += 1
        if kind == "killed":
            victim.process.kill()
        elif kind == "asked to leave":
            victim.ask_to_leave()
        elif kind == "connection reset":
            victim.tap.cut()
        else:
            victim.tap.unplug()
            victim.dark_until = time.monotonic() + random.uniform(*DARK_SECONDS)

    def plug_in(self, *, all_of_them: bool = False) -> None:
        for actor in self.actors:
            if not actor.tap.plugged and (all_of_them or time.monotonic() > actor.dark_until):
                actor.tap.plug()

    def finish(self) -> list[str]:
        """Let all actors leave, then the learner; return what went wrong."""
        self.plug_in(all_of_them=True)
        wrong = []
        for actor in self.living:
            actor.ask_to_leave()
        for actor in self.actors:
            actor.process.wait(300)
            said = actor.output.read_text()
            number = re.search(rf"{actor.name} delivered (\d+) rows", said)
            if number is not None and int(number[1]) > len(actor.tap.confirmed):
                wrong.append(f"{number[0]}, but {len(actor.tap.confirmed)} were confirmed")
            if actor.process.returncode not in (0, -signal.SIGKILL):
                wrong.append(f"{actor.name} ended with {actor.process.returncode}: {said[-600:]}")
        self.check_learner()
        self.learner.terminate()
        self.learner.wait(300)
        return wrong

    def kill_all(self) -> None:
        for process in (self.learner, *(actor.process for actor in self.actors)):
            process.kill()


def rows_in_replay(folder: Path, leaves: dict) -> list[Row]:
    """Return every row of a rank's replay; ``leaves`` are those of any batch."""
    example = TensorDict({}, batch_size=[0])
    for key, leaf in leaves.items():
        example[key] = leaf[:0]
    storage = JournalStorage.attached(folder, Layout.like(example))
    most = storage.sizes.rows
    full = [lane["committed"] for lane in storage.cursor()["lanes"]]
    assert max(full) <= most, f"a lane of {most} rows has forgotten some: {full}"
    found: list[Row] = []
    keys = (schema.EPISODE_ID, schema.DECISION)
    for part in storage.live().split(1024):
        rows = storage.columns(part, keys)
        found += zip(*(rows[key].flatten().tolist() for key in keys), strict=True)
    return found


def compare(soak: Soak) -> list[str]:
    """Print and judge what was confirmed and what is there."""
    confirmed = set().union(*(actor.tap.confirmed for actor in soak.actors))
    sent = set().union(*(actor.tap.sent for actor in soak.actors))
    leaves = next(actor.tap.leaves for actor in soak.actors if actor.tap.leaves)
    there = rows_in_replay(soak.run / "replay" / "rank-0", leaves)
    print(f"rows sent {len(sent)}, confirmed {len(confirmed)}, in the replay {len(there)}")
    found = {
        "confirmed and not there": len(confirmed - set(there)),
        "there twice": len(there) - len(set(there)),
        "there and never sent": len(set(there) - sent),
    }
    unheard = len(set(there) - confirmed)
    print("; ".join(f"rows {name}: {number}" for name, number in found.items()))
    print(f"rows there of which the actor was not told before it was killed or replaced: {unheard}")
    return [f"{number} rows {name}" for name, number in found.items() if number]


def stalls(folder: Path, began: float, calm_until: float) -> list[str]:
    """Print and judge how long the learner stood still, and how long it waited for actors."""
    rows = [row for row in read_metrics(folder) if row["update"] and row["time"] >= began]
    gaps = [(b["time"] - a["time"], b) for a, b in pairwise(rows)]
    longest = {}
    for name, part in (
        ("baseline", [gap for gap in gaps if gap[1]["time"] <= calm_until]),
        ("after it", [gap for gap in gaps if gap[1]["time"] > calm_until]),
    ):
        length, row = max(part, key=lambda gap: gap[0])
        longest[name] = max(seconds * row[WAIT_ACTORS] for seconds, row in part)
        print(
            f"{name}: {len(part)} rows of 5 updates; the slowest took {length:.2f} s, "
            f"{length * row[WAIT_ACTORS]:.2f} s of it waiting for actors, {row[ACTORS_REMOTE]:.0f} "
            f"present; the longest wait for actors in a row was {longest[name]:.2f} s"
        )
    limit = max(MOST_SECONDS, 2 * longest["baseline"])
    if longest["after it"] <= limit:
        return []
    return [f"the learner waited {longest['after it']:.1f} s for actors, at most {limit:.1f}"]


def newest(folder: Path) -> float:
    """Return the time of the newest row of metrics."""
    return read_metrics(folder)[-1]["time"]


def soak_for(soak: Soak, seconds: float, every: float) -> tuple[float, float]:
    """Wait until all places have an actor, leave them alone for a while, then disturb them.

    Returns:
        Times of the run's metrics at which the baseline began and ended.
    """
    for _ in range(PLACES):
        soak.add()
    while len(soak.working()) < PLACES:
        time.sleep(0.2)
        soak.check_learner()
    began, started, event, calm_until = newest(soak.run), time.monotonic(), seconds / 10, None
    while (elapsed := time.monotonic() - started) < seconds:
        time.sleep(0.2)
        soak.check_learner()
        soak.plug_in()
        if elapsed > event:
            event += random.expovariate(1 / every)
            calm_until = calm_until or newest(soak.run)
            soak.disturb()
    return began, calm_until


def main() -> int:
    """Soak and report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=8.0, help="mean seconds between two events")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    seconds = 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="remote-soak-") as root:
        soak = Soak(Path(root))
        soak.start_learner(int(ROWS_PER_SECOND * seconds))
        try:
            began, calm_until = soak_for(soak, seconds, arguments.every)
            wrong = soak.finish()
        finally:
            soak.kill_all()
        events = ", ".join(f"{number} {name}" for name, number in sorted(soak.done.items()))
        print(f"{arguments.minutes:g} min, {len(soak.actors)} actors for {PLACES} places: {events}")
        wrong += compare(soak) + stalls(soak.run, began, calm_until)
    for fault in wrong:
        print(f"WRONG: {fault}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
