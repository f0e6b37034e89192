"""How long a save stops the learner: synchronous against in the background, and what it copies.

One rank with a transformer-like stack of layers and AdamW moments. ``stall`` is the time until
``save`` returns; ``complete`` the time until the checkpoint has its name. In the background the
learner goes on meanwhile (here: matrix products of the same size all the time), on the same cores.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from torch import nn

from torchrl_vla import topology
from torchrl_vla.checkpoint import Checkpointer


def stack(megabytes: float, width: int) -> nn.Module:
    """Return layers that have about that many bytes of float32 parameters."""
    layers = max(1, round(megabytes * 1e6 / (4 * width * width)))
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW after one step, so that it has moments."""
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def main() -> None:
    parser = command_line(__doc__.splitlines()[0], turns=5)
    parser.add_argument("--megabytes", type=float, default=64.0, help="of the parameters")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=None, help="parent of the scratch folder")
    args: argparse.Namespace = parser.parse_args()
    torch.manual_seed(0)
    ranks = topology.start("cpu")
    model = stack(args.megabytes, args.width)
    optimizer = trained(model)
    state = {"modules": {"m": model}, "optimizers": {"adam": (optimizer, [model])}}
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=args.folder))
    store, steps = Checkpointer(folder, keep_last=1, keep_best=0), iter(range(10**9))
    work = torch.randn(args.width, args.width)

    def save(background: bool) -> Sample:
        begun = time.perf_counter()
        path = store.save(next(steps), state, topology=ranks, background=background)
        stall = time.perf_counter() - begun
        while not path.exists():
            work.mm(work)
        store.wait()
        return {"stall ms": stall * 1e3, "complete ms": (time.perf_counter() - begun) * 1e3}

    conditions = machine()
    try:
        samples = take_turns(
            {"synchronous": lambda: save(False), "background": lambda: save(True)}, args.turns
        )
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(folder)
        ranks.stop()
    report(
        f"Saving a checkpoint of {size / 1e6:.0f} MB",
        samples,
        [
            Ratio("stall", "background", ["synchronous"], "stall ms", 0.10, False),
            Ratio("complete", "background", ["synchronous"], "complete ms", None, False),
        ],
        settings={key: str(value) for key, value in vars(args).items()},
        conditions=conditions,
        out=args.out,
    )


if __name__ == "__main__":
    main()
