"""A real training that is killed again and again, and what it has learned in the end.

    make faults KILLS=100

Runs ``launch/train.py algo=sac`` as shipped, but for checkpoints every ten seconds and no limit of
minutes: lost time is made up for. In turn an actor, a learner rank, the whole tree, and the whole
tree amid a save are killed. Prints success before and after beside what an uninterrupted run
reaches (README.md). Exit code 1 if a checkpoint, a row of metrics or a resume went missing.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from kill_runs import KINDS, TORCHRUN, Life, leftovers, resumed_where_saved

from torchrl_vla.checkpoint.files import why_refused
from torchrl_vla.metrics import read_metrics

TRAIN = Path(__file__).parents[2] / "launch" / "train.py"


def train(folder: Path, args: argparse.Namespace) -> Counter:
    """Train to the end, killing on the way; returns what was found."""
    words = (
        *(*TORCHRUN, f"--nproc-per-node={args.ranks}", TRAIN, f"run_dir={folder}", "resume=auto"),
        *("checkpoint.every_minutes=0.17", "budget.minutes=null", "logger.display=false"),
        *("evaluation.videos=0", "evaluation.every_minutes=1e6", *args.overrides),
    )
    found, temporary = Counter(), folder.parent / "tmp"
    temporary.mkdir()
    life = Life(folder, words, args.every)
    for number in range(args.kills):
        time.sleep(random.uniform(0, 2 * args.seconds))
        if life.process.poll() is not None:  # it is over: no more to kill
            break
        kind = KINDS[number % len(KINDS)]
        found[f"kills: {kind}"] += 1
        if life.kill(kind):
            continue
        saved = sorted((folder / "checkpoints").glob("step-*"))
        reasons = [why_refused(path, None) for path in saved]
        found["checkpoints marked complete"] += len(saved)
        found["checkpoints loadable"] += reasons.count(None)
        found["orphans"] += life.orphans
        found["leftovers"] += leftovers(temporary, life.pids, life.mapped)
        life = Life(folder, words, args.every)
        found["resumes elsewhere"] += not resumed_where_saved(life, saved[-1] if saved else None)
    if code := life.process.wait(3600):
        raise RuntimeError(f"the run ended with {code}:\n{life.said()}")
    steps = [row["update"] for row in read_metrics(folder)]
    found["rows of metrics repeated"] = len(steps) - len(set(steps))
    return found


def main() -> int:
    """Train, kill and report; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=15.0, help="between two kills, on average")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--every", type=int, default=25, help="updates per row of metrics")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("overrides", nargs="*", default=("algo=sac",))
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory(prefix="kill-training-") as root:
        folder = Path(root) / "run"
        found = train(folder, args)
        looks = [row for row in read_metrics(folder) if "eval/success_rate" in row]
        last = json.loads((folder / "eval.json").read_text())
        rows = read_metrics(folder)
    for name, count in found.items():
        print(f"  {name:34s}{count}")
    low, high = last["interval"]
    print(f"{rows[-1]['env_steps']} env steps, {rows[-1]['update']} updates; success "
          f"{looks[0]['eval/success_rate']:.1%} -> {last['success_rate']:.1%} "
          f"[{low:.1%}, {high:.1%}] of {last['episodes']}")  # fmt: skip
    names = ("orphans", "leftovers", "rows of metrics repeated", "resumes elsewhere")
    lost = [name for name in names if found[name]]
    if found["checkpoints marked complete"] != found["checkpoints loadable"]:
        lost.append("checkpoints")
    print(f"LOST: {', '.join(lost)}" if lost else "nothing was lost")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
