"""Train a policy: ``torchrun launch/train.py algo=sac`` (or ``python`` for one process).

The only place that knows Hydra: it composes ``conf/``, checks what can be checked before any
process starts, and hands plain objects to a loop of ``torchrl_vla.loops``.

Exit codes: 0 the run is over; 75 it was asked to stop (SIGTERM or SIGUSR1 on any rank), has saved
and can be resumed; anything else is an error. torchrun itself ends with 1 when its ranks end with
75: ``stopped.json`` in the run folder says so, too.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path

from torchrl_vla.envs.gl import choose_backend

os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")  # TorchRL's own log; actors inherit it
try:
    choose_backend()  # before anything imports mujoco
except RuntimeError as error:
    sys.exit(str(error))

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from torchrl_vla import topology
from torchrl_vla.actors import die_with_parent
from torchrl_vla.loops import off_policy, on_policy
from torchrl_vla.loops.check import check_ratio
from torchrl_vla.loops.plans import Budget, CheckpointPlan, EvaluationPlan
from torchrl_vla.loops.run import Run, write_json
from torchrl_vla.remote import Listening, listening
from torchrl_vla.report import CURVE_FILE, write_page
from torchrl_vla.signals import RESUME_ME, StopSignals

STOPPED_FILE = "stopped.json"
"""Is in the folder of a run that was asked to stop, until it is resumed."""


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
        ValueError: ``resume`` is no run folder, or ``run_dir`` holds a run and resume is off.
    """
    if cfg.resume not in ("never", "auto"):
        folder = Path(cfg.resume)
        if not (folder / "config.yaml").exists():
            raise ValueError(
                f"resume={cfg.resume!r}: use never, auto, or the folder of a run (that has a "
                "config.yaml)"
            )
        if cfg.run_dir is not None and Path(cfg.run_dir).absolute() != folder.absolute():
            raise ValueError(
                f"resume={cfg.resume} and run_dir={cfg.run_dir} are two folders; a run goes on in "
                "its own: leave run_dir=null"
            )
        return folder, True
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


def check_same_settings(cfg: DictConfig, ranks: topology.Topology) -> None:
    """Refuse ranks that were started with different settings, as two nodes can be. Collective.

    Raises:
        ValueError: they differ from those of rank 0.
        RuntimeError: those of another rank do.
    """
    mine = OmegaConf.to_yaml(cfg, resolve=True).splitlines()
    first = ranks.broadcast_object(mine)

    def check() -> None:
        pairs = zip_longest(mine, first, fillvalue="nothing")
        differing = [f"{a.strip()!r} instead of {b.strip()!r}" for a, b in pairs if a != b]
        if differing:
            raise ValueError(
                f"rank {ranks.rank} was started with other settings than rank 0: "
                f"{', '.join(differing[:5])}; give every node the same command line"
            )

    ranks.together(check)


def build_run(cfg: DictConfig, ranks: topology.Topology) -> tuple[Run, bool]:
    """Agree on settings and folder over all ranks, write the config there and build the run."""
    check_same_settings(cfg, ranks)
    folder, resume = ranks.broadcast_object(choose_folder(cfg) if ranks.is_main else None)
    if ranks.is_main:
        (folder / STOPPED_FILE).unlink(missing_ok=True)
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
        saves=CheckpointPlan(**cfg.checkpoint),
        deterministic=cfg.topology.deterministic,
        display=cfg.logger.display,
        report=leave_report,
    )
    return run, resume


def leave(run: Run, stop: StopSignals) -> None:
    """Exit with the code for a run that was asked to stop, if it was; its last act."""
    if not run.interrupted:
        return
    asked = None if stop.received is None else stop.received.name
    if run.topology.is_main:
        facts = {"signal": asked, "update": run.counters["updates"], "exit_code": RESUME_ME}
        write_json(run.folder / STOPPED_FILE, facts)
        print(
            f"asked to stop ({asked or 'on another rank'}): saved at update {facts['update']}; "
            f"go on with run_dir={run.folder} resume=auto",
            flush=True,
        )
    run.topology.stop()
    sys.exit(RESUME_ME)


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


def choose_listening(cfg: DictConfig, loop: partial[None]) -> dict[str, Listening]:
    """Return what the loop needs to know of remote actors: nothing if actors are local.

    Raises:
        ValueError: the algorithm cannot have them.
    """
    if cfg.topology.get("listen") is None:
        return {}
    if loop.func is not off_policy.train:
        raise ValueError(
            f"topology=remote with algo={cfg.algo.name}: its rounds need every actor, and remote "
            "ones may leave at any time; use topology=local, or an off-policy algorithm such as sac"
        )
    if cfg.topology.actors != "local":
        raise ValueError(
            f"topology=remote with topology.actors={cfg.topology.actors}: remote actors bring "
            "copies of the policy; leave topology.actors=local"
        )
    parts = {name: OmegaConf.to_container(cfg[name], resolve=True) for name in ("env", "policy")}
    return {"remote": listening(cfg.topology.listen, cfg.topology.secret_file, parts)}


@hydra.main(version_base="1.3", config_path="../conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """Compose, check, train."""
    OmegaConf.resolve(cfg)
    if topology.under_torchrun():
        die_with_parent(os.getppid())  # torchrun may be killed without a chance to tell us
    with StopSignals(graceful=cfg.check is None) as stop:
        train(cfg, stop)


def train(cfg: DictConfig, stop: StopSignals) -> None:
    """Join the ranks, build the run and let the loop do it."""
    if cfg.topology.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS is not
        torch.use_deterministic_algorithms(True)
    ranks = topology.start(
        cfg.topology.device,
        replicate=cfg.topology.replicate,
        actors=cfg.topology.actors,
        actor_gpus=cfg.topology.actor_gpus,
        server_groups=cfg.topology.server_groups,
        threads=cfg.topology.threads,
        timeout=timedelta(minutes=cfg.topology.timeout_minutes),
    )
    run, resume = build_run(cfg, ranks)
    run.stop_asked = stop.asked
    shared = {"seed": cfg.seed, "make_policy": instantiate(cfg.policy), "resume": resume}
    if "gamma" in cfg:
        shared["gamma"] = cfg.gamma
    loop = instantiate(OmegaConf.masked_copy(cfg.algo, [k for k in cfg.algo if k != "name"]))
    if cfg.check is not None:
        passed = choose_check(cfg, loop)(run, **shared)
        ranks.stop()
        sys.exit(0 if passed else 1)
    shared |= choose_listening(cfg, loop)
    with run.screen:
        loop(run, **shared)
    leave(run, stop)
    ranks.stop()


if __name__ == "__main__":
    main()
