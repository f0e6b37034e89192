"""Train a policy: ``torchrun launch/train.py algo=sac`` (or ``python`` for one process).

The only place that knows Hydra: it composes ``conf/``, checks what can be checked before any
process starts, and hands plain objects to a loop of ``torchrl_vla.loops``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

from torchrl_vla.envs.gl import choose_backend

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # TorchRL's own log; actors inherit it
try:
    choose_backend()  # before anything imports mujoco
except RuntimeError as error:
    sys.exit(str(error))

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from torchrl_vla import topology
from torchrl_vla.actors import die_with_parent
from torchrl_vla.loops import on_policy
from torchrl_vla.loops.check import check_ratio
from torchrl_vla.loops.run import Budget, EvaluationPlan, Run
from torchrl_vla.report import CURVE_FILE, write_page


def new_folder(root: Path, name: str) -> Path:
    """Make a folder that no other run has, also not one started in the same second."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    root.mkdir(parents=True, exist_ok=True)
    for number in range(10_000):
        folder = root / (f"{name}-{stamp}" + (f"-{number}" if number else ""))
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise RuntimeError(f"cannot find a free folder name under {root}")


def choose_folder(cfg: DictConfig) -> tuple[Path, bool]:
    """Return the run folder and whether there is something in it to resume.

    Raises:
        ValueError: ``resume`` is unknown, or ``run_dir`` holds a run and resume is off.
    """
    if cfg.resume not in ("never", "auto"):
        raise ValueError(f"resume={cfg.resume!r} is unknown; use resume=never or resume=auto")
    if cfg.run_dir is None:
        if cfg.resume == "auto":
            runs = sorted(Path("runs").glob(f"{cfg.algo.name}-*"), key=lambda p: p.stat().st_mtime)
            if runs:
                return runs[-1], True
        return new_folder(Path("runs"), cfg.algo.name), False
    folder = Path(cfg.run_dir)
    used = (folder / "config.yaml").exists()
    if used and cfg.resume == "never":
        raise ValueError(f"run_dir={folder} holds a run; use resume=auto or another run_dir")
    folder.mkdir(parents=True, exist_ok=True)
    return folder, used


def leave_report(folder: Path, algorithm: str) -> Path:
    """Leave curve and page in a run's folder; return the curve."""
    return write_page(folder, algorithm=algorithm).with_name(CURVE_FILE)


def build_run(cfg: DictConfig, ranks: topology.Topology) -> tuple[Run, bool]:
    """Agree on the folder over all ranks, write the config there and build the run."""
    folder, resume = ranks.broadcast_object(choose_folder(cfg) if ranks.is_main else None)
    if ranks.is_main:
        OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    policy = OmegaConf.to_container(cfg.policy, resolve=True)
    run = Run(
        folder=folder,
        topology=ranks,
        suite=instantiate(cfg.env),
        chunk_size=cfg.chunk_size,
        budget=Budget(**cfg.budget),
        evaluation=EvaluationPlan(**cfg.evaluation),
        algorithm=cfg.algo.name,
        settings={"policy": policy, "chunk_size": cfg.chunk_size, "seed": cfg.seed},
        save_minutes=cfg.save_minutes,
        display=cfg.logger.display,
        report=leave_report,
    )
    return run, resume


def choose_check(cfg: DictConfig, loop: partial[None]) -> partial[bool]:
    """Return the check that ``check`` names, with the settings of the loop.

    Raises:
        ValueError: no such check, or the algorithm stores no log-probs to compare.
    """
    if cfg.check != "ratio":
        raise ValueError(f"check={cfg.check!r} is unknown; use check=ratio or check=null")
    if loop.func is not on_policy.train:
        raise ValueError(
            f"check=ratio compares the log-probs that actors store with the learner's, and "
            f"algo={cfg.algo.name} stores none; use it with an on-policy algorithm such as ppo"
        )
    return partial(check_ratio, **loop.keywords)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """Compose, check, train."""
    OmegaConf.resolve(cfg)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if topology.under_torchrun():
        die_with_parent(os.getppid())  # torchrun may be killed without a chance to tell us
    ranks = topology.start(
        cfg.topology.device,
        replicate=cfg.topology.replicate,
        threads=cfg.topology.threads,
        timeout=timedelta(minutes=cfg.topology.timeout_minutes),
    )
    run, resume = build_run(cfg, ranks)
    shared = {"seed": cfg.seed, "make_policy": instantiate(cfg.policy)}
    if "gamma" in cfg:
        shared |= {"gamma": cfg.gamma, "resume": resume}
    loop = instantiate(OmegaConf.masked_copy(cfg.algo, [k for k in cfg.algo if k != "name"]))
    if cfg.check is not None:
        passed = choose_check(cfg, loop)(run, **shared)
        ranks.stop()
        sys.exit(0 if passed else 1)
    with run.screen:
        loop(run, **shared)
    ranks.stop()


if __name__ == "__main__":
    main()
