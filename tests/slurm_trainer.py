"""The contract of launch/train.py towards a job script, without its weight.

Ranks step together, save on SIGUSR1 or SIGTERM to any of them, and all end with 75; started again
in the same run folder they go on from the last save. Ranks meet in files: nothing here needs torch.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

STOPPED = 75
SAVE_EVERY = 10
given = dict(word.split("=", 1) for word in sys.argv[1:])
folder = Path(given["run_dir"])
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ["TORCHELASTIC_RUN_ID"]
checkpoint = folder / "checkpoint.json"
asked = folder / f"asked.{attempt}"


def write(path: Path, content: object) -> None:
    temporary = path.with_name(f".{path.name}.{rank}")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)


def read(path: Path) -> int:
    return json.loads(path.read_text()) if path.exists() else 0


def note(event: str, step: int) -> None:
    with (folder / "events.jsonl").open("a") as file:
        line = {"event": event, "attempt": attempt, "rank": rank, "step": step}
        file.write(json.dumps({**line, "node": os.environ.get("SLURMD_NODENAME")}) + "\n")


def main() -> int:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.touch())
    step = read(checkpoint)
    (folder / "stopped.json").unlink(missing_ok=True)
    print(f"rank {rank} of {world} starts at {step}", flush=True)
    note("start", step)
    while step < int(given["steps"]):
        time.sleep(0.1)
        step += 1
        write(folder / f"at.{attempt}.{rank}", step)
        while any(read(folder / f"at.{attempt}.{other}") < step for other in range(world)):
            time.sleep(0.01)
        # rank 0 decides for all of them what happens after this step
        decision = folder / f"decision.{attempt}.{step}"
        if rank == 0:
            write(decision, asked.exists())
            if asked.exists() or step % SAVE_EVERY == 0:
                write(checkpoint, step)
        while not decision.exists():
            time.sleep(0.01)
        if json.loads(decision.read_text()):
            note("stopped", step)
            if rank == 0:
                write(folder / "stopped.json", step)
            return STOPPED
    note("done", step)
    return 0


sys.exit(main())
