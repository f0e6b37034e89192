"""The contract of launch/train.py towards a job script, without its weight.

Ranks step together, save on SIGUSR1 or SIGTERM to any of them, and all end with 75; started again
in the same run folder they go on from the last save. With ``endless=yes`` the first attempt goes on
until it is stopped. Ranks meet in files: nothing here needs torch.
With topology=remote each listens, says where in the run folder, and notes which actors came; when
``meet=N`` of them were there and the steps are done, these are told that the run is over
(tests/slurm_actor.py).
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

STOPPED = 75
SAVE_EVERY = 10
given = dict(word.split("=", 1) for word in sys.argv[1:])
actors: list[socket.socket] = []
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


def note(event: str, step: int, **more: object) -> None:
    with (folder / "events.jsonl").open("a") as file:
        line = {"event": event, "attempt": attempt, "rank": rank, "step": step, **more}
        file.write(json.dumps({**line, "node": os.environ.get("SLURMD_NODENAME")}) + "\n")


def listen() -> None:
    """Let actors come in who know the secret."""
    interface, port = given["topology.listen"].split(":")
    assert (interface, port) == ("lo", "0")
    secret = Path(given["topology.secret_file"])
    listener = socket.create_server(("127.0.0.1", 0))
    own = folder / "actors" / f"rank-{rank}"
    own.mkdir(parents=True, exist_ok=True)
    write(own / "remote.json", {"listens": f"127.0.0.1:{listener.getsockname()[1]}"})

    def accept() -> None:
        while True:
            actor, _ = listener.accept()
            said, name = actor.makefile().readline().split()
            assert said == secret.read_text()
            mode = oct(secret.stat().st_mode & 0o777)
            note("actor", 0, name=name, mode=mode, places=given["algo.actors.num_workers"])
            actors.append(actor)

    threading.Thread(target=accept, daemon=True).start()


def met() -> int:
    rows = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return sum(row["event"] == "actor" and row["attempt"] == attempt for row in rows)


def main() -> int:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.touch())
    step = read(checkpoint)
    (folder / "stopped.json").unlink(missing_ok=True)
    if given.get("topology") == "remote":
        listen()
    print(f"rank {rank} of {world} starts at {step}", flush=True)
    note("start", step)
    endless = "endless" in given and attempt.endswith(".0")
    while endless or step < int(given["steps"]):
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
    while met() < int(given.get("meet", 0)):
        time.sleep(0.1)
    note("done", step)
    for actor in actors:
        actor.sendall(b"over")
    return 0


sys.exit(main())
