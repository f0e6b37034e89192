"""Hours of training with an actor killed every few seconds: throughput, memory, descriptors.

    make soak MINUTES=60

Runs ``launch/train.py`` (by default ``algo=sac`` with two actors), leaves it alone for a fifth of
the time as the baseline, then kills a random actor every ``--every`` seconds. Prints its speed
with and without kills, the restarts, and the learner's memory and open descriptors over the time.
In the end it asks the run to stop and evaluates its last checkpoint. Exit code 1 if the run ended
early or descriptors grew.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from small_run import actors_of

from torchrl_vla.metrics import read_metrics
from torchrl_vla.signals import RESUME_ME

LAUNCH = Path(__file__).parents[2] / "launch"
LOOK_SECONDS = 2.0
# Two workers collect 256 decisions at a time.
SAC = ("algo=sac", "algo.actors.num_workers=2", "algo.pace.slack_decisions=256")


@dataclass
class Look:
    """The run at one moment."""

    seconds: float
    env_steps: int
    rss_mib: float
    descriptors: int
    kills: int
    restarts: float


def look(learner: psutil.Process, folder: Path, started: float, kills: int) -> Look | None:
    """Return how the run is, or ``None`` before its first row."""
    try:
        rows = [row for row in read_metrics(folder) if row["update"]]
    except FileNotFoundError:
        return None
    if not rows:
        return None
    return Look(
        time.monotonic() - started,
        rows[-1]["env_steps"],
        learner.memory_info().rss / 2**20,
        learner.num_fds(),
        kills,
        rows[-1]["actors/restarts"],
    )


def rate(looks: list[Look]) -> float:
    """Return env steps per second over ``looks``."""
    first, last = looks[0], looks[-1]
    return (last.env_steps - first.env_steps) / max(last.seconds - first.seconds, 1e-9)


def soak(arguments: argparse.Namespace, folder: Path) -> list[Look]:
    """Train and kill; returns what was seen, from the first row on."""
    output = (folder.parent / "output.txt").open("w")
    words = [
        *(sys.executable, LAUNCH / "train.py", f"run_dir={folder}", "logger.display=false"),
        *("budget.minutes=null", "budget.env_steps=null", "budget.updates=1000000000"),
        *("evaluation.every_minutes=1e6", "evaluation.final_episodes=8", "evaluation.episodes=8"),
        *("evaluation.videos=0", "algo.actors.max_restarts=1000000", *arguments.overrides),
    ]
    learner = psutil.Popen([*map(str, words)], stdout=output, stderr=output)
    started, seen, kills, next_kill = None, [], 0, 0.0
    end = 60 * arguments.minutes
    try:
        while started is None or time.monotonic() - started < end:
            time.sleep(LOOK_SECONDS)
            if learner.poll() is not None:
                raise RuntimeError(
                    f"the run ended with exit code {learner.returncode}:\n"
                    f"{(folder.parent / 'output.txt').read_text()[-4000:]}"
                )
            now = look(learner, folder, started or time.monotonic(), kills)
            if now is None:
                continue
            if started is None:
                started, next_kill = time.monotonic(), time.monotonic() + end / 5
            seen.append(now)
            if time.monotonic() >= next_kill:
                next_kill += arguments.every
                if actors := actors_of(learner):
                    random.choice(actors).kill()
                    kills += 1
        learner.send_signal(signal.SIGTERM)
        if (code := learner.wait(120)) != RESUME_ME:
            raise RuntimeError(f"asked to stop, the run ended with {code}, not {RESUME_ME}")
    finally:
        if learner.is_running():
            for process in (learner, *learner.children(recursive=True)):
                process.kill()
            learner.wait()
    return seen


def success(folder: Path, episodes: int) -> str:
    """Evaluate the newest checkpoint of a run; returns its success with the interval."""
    out = folder.parent / "evaluation.json"
    words = (f"checkpoint={folder}", f"episodes={episodes}", "num_envs=16", f"out={out}")
    subprocess.run([sys.executable, LAUNCH / "evaluate.py", *words], check=True)
    found = json.loads(out.read_text())
    low, high = found["interval"]
    return f"{found['success_rate']:.1%} [{low:.1%}, {high:.1%}] of {episodes} held-out states"


def main() -> int:
    """Soak and report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--episodes", type=int, default=200, help="of the evaluation in the end")
    parser.add_argument("overrides", nargs="*", default=SAC)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        seen = soak(arguments, Path(root) / "run")
        print("success in the end:", success(Path(root) / "run", arguments.episodes))
    calm = [now for now in seen if not now.kills]
    rough = [now for now in seen if now.kills]
    print(f"{seen[-1].seconds / 60:.1f} minutes, {rough[-1].kills} kills, one per "
          f"{arguments.every:g} s, {rough[-1].restarts:.0f} restarts")  # fmt: skip
    print(f"env steps/s: {rate(calm):.1f} before the first kill, {rate(rough):.1f} after: "
          f"{100 * rate(rough) / rate(calm):.0f} %")  # fmt: skip
    parts = [rough[k * len(rough) // 4 : (k + 1) * len(rough) // 4] for k in range(4)]
    for name, unit in (("rss_mib", "MiB resident"), ("descriptors", "open descriptors")):
        middle = [statistics.median(getattr(now, name) for now in part) for part in (calm, *parts)]
        print(f"{unit}, medians without kills and of four quarters with: "
              + ", ".join(f"{value:.0f}" for value in middle))  # fmt: skip
    grown = max(now.descriptors for now in parts[-1]) - max(now.descriptors for now in calm)
    print(f"descriptors grew by {grown}")
    return 0 if grown <= 4 else 1


if __name__ == "__main__":
    sys.exit(main())
