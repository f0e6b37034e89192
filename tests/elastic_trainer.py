"""A run whose ranks may become fewer and more: counts steps together, saves after each.

Run by torchrun: ``elastic_trainer.py FOLDER``; ends when FOLDER/finish is there.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from torchrl_vla import topology


def main(folder: Path) -> None:
    ranks = topology.start("cpu", replicate="node", timeout=timedelta(seconds=60))
    checkpoint = folder / "checkpoint.json"
    step = ranks.broadcast_object(json.loads(checkpoint.read_text()) if checkpoint.exists() else 0)
    with (folder / "starts.jsonl").open("a") as file:
        facts = {"rank": ranks.rank, "world": ranks.world_size, "step": step, "pid": os.getpid()}
        file.write(json.dumps(facts | {"replicas": ranks.layout.replicate}) + "\n")
    while not ranks.any_true((folder / "finish").exists()):
        time.sleep(0.1)
        step += int(ranks.all_reduce_sum(torch.ones(1)).item()) // ranks.world_size
        if ranks.is_main:
            temporary = checkpoint.with_suffix(".tmp")
            temporary.write_text(json.dumps(step))
            os.replace(temporary, checkpoint)
    ranks.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
