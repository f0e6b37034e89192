"""Evaluate a policy: ``python launch/evaluate.py checkpoint=RUN_DIR episodes=200 out=F.json``.

Prints the per-task table with 95 % Wilson intervals and writes JSON, for ``launch/compare.py``. The
result is the same for any ``num_envs`` and, under ``torchrun``, for any number of ranks. With
``watch=true`` it runs beside a training and evaluates every new checkpoint into
``RUN_DIR/evaluations``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from torchrl_vla.envs.simulator import Simulators, Suite
from torchrl_vla.evaluate import (
    as_rows,
    describe_environment,
    film,
    film_grid,
    fingerprint,
    list_of,
    run_on_ranks,
    summarise,
)
from torchrl_vla.loops.run import write_json
from torchrl_vla.policies.description import check_description, describe

FOLDER = "evaluations"
"""Where ``watch`` writes, in the run's folder."""
LAYOUTS = {"sequence": film, "grid": film_grid}


class Subject(NamedTuple):
    """What is evaluated: a run's suite and policy, whose weights come from a checkpoint."""

    folder: Path
    config: DictConfig
    suite: Suite
    policy: nn.Module
    checkpoints: Checkpointer

    def load(self, path: Path, ranks: topology.Topology) -> list[dict[str, Any]]:
        """Load a checkpoint into the policy; return the run's own evaluations up to it."""
        state = {"modules": {"evaluated": self.policy}}
        plain = self.checkpoints.load(path, state, ranks)["json"] or {}
        if "policy" in plain:
            check_description(plain["policy"], describe(self.policy), path)
        return plain.get("history", [])


def open_run(folder: Path, eval_decode: str | None) -> Subject:
    """Build the run's suite and policy, with another decode if one is given.

    Raises:
        FileNotFoundError: the folder is no run.
    """
    if not (folder / "config.yaml").is_file():
        raise FileNotFoundError(f"{folder} is no run folder: it has no config.yaml")
    config = OmegaConf.load(folder / "config.yaml")
    if eval_decode is not None:
        config.policy.eval_decode = eval_decode
    suite = instantiate(config.env)
    policy = instantiate(config.policy)(suite.meta)
    return Subject(folder, config, suite, policy, Checkpointer(folder / "checkpoints"))


def choose_checkpoint(subject: Subject, which: str, ranks: topology.Topology) -> Path:
    """Return the latest or the best checkpoint.

    Raises:
        ValueError: ``which`` is unknown.
        FileNotFoundError: there is no such checkpoint.
    """
    if which not in ("latest", "best"):
        raise ValueError(f"which is {which!r}, must be 'latest' or 'best'")
    find = subject.checkpoints.latest if which == "latest" else subject.checkpoints.best
    path = find(ranks)
    if path is None:
        raise FileNotFoundError(f"{subject.folder} has no complete checkpoint yet ({which})")
    return path


def selection(which: str, history: list[dict[str, Any]], first_state: int) -> dict[str, Any]:
    """Say how the checkpoint was chosen, and whether on the states that judge it now.

    The best of several noisy rates is on average better than the policy behind it; the more looks,
    the more. Only states that had no part in the choice judge it without bias.
    """
    if which == "latest":
        return {"rule": "latest", "looks": 0, "biased": False}
    states = max((entry["episodes"] for entry in history), default=0)
    return {
        "rule": "highest success of the run's own evaluations",
        "looks": len(history),
        "states": states,
        "biased": len(history) > 1 and first_state < states,
    }


def evaluate(
    subject: Subject, simulators: Simulators, path: Path, cfg: DictConfig, ranks: topology.Topology
) -> dict[str, Any]:
    """Load a checkpoint, run its episodes and return the report; collective."""
    history = subject.load(path, ranks)
    suite, policy = subject.suite, subject.policy
    first = suite.splits["eval"].start + cfg.first_state
    results = [
        result
        for seed in cfg.seeds
        for result in run_on_ranks(
            policy,
            simulators,
            range(first, first + cfg.episodes),
            ranks,
            chunk_size=subject.config.chunk_size,
            seed=seed,
            perturbation=cfg.perturbation,
        )
    ]
    settings = OmegaConf.to_container(subject.config.policy, resolve=True)
    return summarise(results, suite.meta) | {
        "checkpoint": path.name,
        "algorithm": subject.config.algo.name,
        "selection": selection(cfg.which, history, cfg.first_state),
        "list": list_of(results, suite.meta),
        "settings": {
            **settings,
            "chunk_size": subject.config.chunk_size,
            "perturbation": cfg.perturbation,
            "first_init_state_id": first,
            "seeds": list(cfg.seeds),
        },
        "versions": fingerprint(),
        "environment": describe_environment(suite, policy),
        "policy": describe(policy),
        "results": as_rows(results),
    }


def print_report(report: dict[str, Any], title: str) -> None:
    """Print success per task and in all, and what to know about how the checkpoint was chosen."""
    table = Table(title=title)
    for name in ("task", "success", "95 % interval", "episodes"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for name, row in (*report["per_task"].items(), ("all", report)):
        low, high = row["interval"]
        table.add_row(
            name,
            f"{100 * row['success_rate']:.1f} %",
            f"{100 * low:.1f} - {100 * high:.1f} %",
            f"{row['successes']}/{row['episodes']}",
        )
    out = Console()
    out.print(table)
    chosen = report["selection"]
    if chosen["biased"]:
        out.print(
            f"The checkpoint is the best of {chosen['looks']} looks at some of these states: its "
            f"rate is too high on average. first_state={chosen['states']} takes fresh states.",
            soft_wrap=True,
        )


def new_checkpoints(root: Path, cfg: DictConfig, ranks: topology.Topology) -> Iterator[None]:
    """Yield whenever the folder of checkpoints has changed; collective.

    Ends when nothing changed for ``cfg.watch_minutes`` (None: never).
    """
    seen: list[str] = []
    waited = 0.0
    while True:
        names = sorted(path.name for path in root.glob("step-*")) if ranks.is_main else None
        names = ranks.broadcast_object(names)
        if names != seen:
            seen, waited = names, 0.0
            yield
        elif cfg.watch_minutes is not None and waited >= 60 * cfg.watch_minutes:
            return
        else:
            time.sleep(cfg.watch_seconds)
            waited += cfg.watch_seconds


def watch(
    subject: Subject, simulators: Simulators, cfg: DictConfig, ranks: topology.Topology
) -> None:
    """Evaluate every new checkpoint into the run's folder; one that is there already is left."""
    for _ in new_checkpoints(subject.folder / "checkpoints", cfg, ranks):
        path = subject.checkpoints.latest(ranks)
        if path is None or (subject.folder / FOLDER / f"{path.name}.json").exists():
            continue
        try:
            report = evaluate(subject, simulators, path, cfg, ranks)
        except (FileNotFoundError, ValueError):
            if path.exists():
                raise
            continue  # the training thinned it out meanwhile; a newer one is there
        if ranks.is_main:
            (subject.folder / FOLDER).mkdir(exist_ok=True)
            write_json(subject.folder / FOLDER / f"{path.name}.json", report)
            print_report(report, f"{subject.folder} ({path.name})")
        ranks.barrier()


def check(cfg: DictConfig) -> None:
    """Refuse settings that cannot work together.

    Raises:
        ValueError: names them.
    """
    if cfg.episodes < 1 or not cfg.seeds:
        raise ValueError(f"episodes={cfg.episodes}, seeds={list(cfg.seeds)}: give at least one")
    if len(set(cfg.seeds)) < len(cfg.seeds):
        raise ValueError(f"seeds={list(cfg.seeds)} repeats one; each must be there once")
    if cfg.video_layout not in LAYOUTS:
        raise ValueError(f"video_layout is {cfg.video_layout!r}, must be one of {[*LAYOUTS]}")
    if cfg.video is not None and cfg.video_episodes < 1:
        raise ValueError(f"video_episodes={cfg.video_episodes}: film at least one, or video=null")
    if cfg.watch and (cfg.which != "latest" or cfg.out is not None or cfg.video is not None):
        raise ValueError(
            "watch=true evaluates every new checkpoint into the run's folder: leave which=latest, "
            "out=null and video=null"
        )


@hydra.main(version_base="1.3", config_path="../conf", config_name="evaluate")
def main(cfg: DictConfig) -> None:
    """Load, run, print, write."""
    check(cfg)
    ranks = topology.start("cpu", threads=cfg.threads)
    torch.manual_seed(0)
    subject = open_run(Path(cfg.checkpoint), cfg.eval_decode)
    simulators = subject.suite.simulators(cfg.num_envs)
    if cfg.watch:
        watch(subject, simulators, cfg, ranks)
    else:
        path = choose_checkpoint(subject, cfg.which, ranks)
        report = evaluate(subject, simulators, path, cfg, ranks)
        if ranks.is_main:
            print_report(report, f"{cfg.checkpoint} ({path.name})")
            if cfg.out is not None:
                write_json(Path(cfg.out), report)
            if cfg.video is not None:
                make_film(subject, cfg)
    simulators.close()
    ranks.stop()


def make_film(subject: Subject, cfg: DictConfig) -> None:
    """Film the first episodes of the list, one after the other or side by side."""
    first = subject.suite.splits["eval"].start + cfg.first_state
    shown = range(first, first + cfg.video_episodes)
    make, count = LAYOUTS[cfg.video_layout], cfg.video_episodes
    simulators = subject.suite.simulators(count if make is film_grid else 1)
    path, chunk_size = Path(cfg.video), subject.config.chunk_size
    make(subject.policy, simulators, shown, path, chunk_size=chunk_size)
    simulators.close()


if __name__ == "__main__":
    main()
