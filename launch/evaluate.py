"""Evaluate a policy: ``python launch/evaluate.py checkpoint=RUN_DIR episodes=200 out=F.json``.

Prints the per-task table with 95 % Wilson intervals and writes JSON. The result is the same for any
``num_envs``: every decision is computed alone (see ``torchrl_vla/evaluate.py``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from torchrl_vla.envs.gl import choose_backend

try:
    choose_backend()  # before anything imports mujoco
except RuntimeError as error:
    sys.exit(str(error))

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from torch import nn

from torchrl_vla import topology
from torchrl_vla.checkpoint import Checkpointer
from torchrl_vla.evaluate import as_rows, film, fingerprint, run_episodes, summarise


def load_policy(run_dir: Path, which: str, ranks: topology.Topology) -> tuple[nn.Module, Any, dict]:
    """Build the run's policy and suite and load a checkpoint into the policy.

    Args:
        run_dir: a run's folder.
        which: ``"latest"`` or ``"best"``.
        ranks: this process as a topology of one.

    Raises:
        FileNotFoundError: the folder is no run, or it has no checkpoint.
    """
    if not (run_dir / "config.yaml").is_file():
        raise FileNotFoundError(f"{run_dir} is no run folder: it has no config.yaml")
    cfg = OmegaConf.load(run_dir / "config.yaml")
    suite = instantiate(cfg.env)
    policy = instantiate(cfg.policy)(suite.meta)
    checkpoints = Checkpointer(run_dir / "checkpoints")
    path = checkpoints.latest() if which == "latest" else checkpoints.best()
    if path is None:
        raise FileNotFoundError(f"{run_dir} has no complete checkpoint yet")
    loaded = checkpoints.load(path, {"modules": {"evaluated": policy}}, ranks)
    return policy, suite, {"config": cfg, "checkpoint": path, "loaded": loaded}


def print_table(table: dict[str, Any], title: str) -> None:
    """Print success per task and in all."""
    out = Table(title=title)
    for name in ("task", "success", "95 % interval", "episodes"):
        out.add_column(name, justify="left" if name == "task" else "right")
    rows = [*table["per_task"].items(), ("all", table)]
    for name, row in rows:
        low, high = row["interval"]
        out.add_row(
            name,
            f"{100 * row['success_rate']:.1f} %",
            f"{100 * low:.1f} - {100 * high:.1f} %",
            f"{row['successes']}/{row['episodes']}",
        )
    Console().print(out)


@hydra.main(version_base="1.3", config_path="../conf", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    """Load, run, print, write."""
    ranks = topology.start("cpu", threads=cfg.threads)
    torch.manual_seed(0)
    policy, suite, run = load_policy(Path(cfg.checkpoint), cfg.which, ranks)
    if cfg.eval_decode is not None:
        policy.eval_decode = cfg.eval_decode
    first = suite.splits["eval"].start + cfg.first_state
    ids = range(first, first + cfg.episodes)
    chunk_size = run["config"].chunk_size
    results = run_episodes(
        policy,
        suite.simulators(cfg.num_envs),
        ids,
        chunk_size=chunk_size,
        perturbation=cfg.perturbation,
    )
    table = summarise(results, suite.meta)
    settings = OmegaConf.to_container(run["config"].policy, resolve=True)
    report = table | {
        "checkpoint": run["checkpoint"].name,
        "algorithm": run["config"].algo.name,
        "settings": {
            **settings,
            "eval_decode": policy.eval_decode,
            "perturbation": cfg.perturbation,
            "first_init_state_id": first,
        },
        "versions": fingerprint(),
        "results": as_rows(results),
    }
    print_table(table, f"{cfg.checkpoint} ({run['checkpoint'].name})")
    if cfg.out is not None:
        Path(cfg.out).write_text(json.dumps(report, indent=1))
    if cfg.video is not None:
        shown = range(first, first + cfg.video_episodes)
        film(policy, suite.simulators(1), shown, Path(cfg.video), chunk_size=chunk_size)
    ranks.stop()


if __name__ == "__main__":
    main()
