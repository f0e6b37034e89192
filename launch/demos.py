"""Record demonstrations: ``python launch/demos.py out=demos/tabletop episodes=100``.

The suite's scripted expert acts, or with ``checkpoint=RUN_DIR`` a trained policy. Only successes
are kept, as a LeRobot v3.0 data set that ``conf/dataset/own.yaml`` reads back.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from torchrl_vla.envs.gl import choose_backend

try:
    choose_backend()  # before anything imports mujoco
except RuntimeError as error:
    sys.exit(str(error))

import hydra
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from torchrl_vla import topology
from torchrl_vla.checkpoint import Checkpointer
from torchrl_vla.data.demonstrations import (
    Episode,
    PolicyTeacher,
    Teacher,
    attempts,
    expert_teacher,
)
from torchrl_vla.data.lerobot_demonstrations import write_demonstrations
from torchrl_vla.schema import SuiteMeta


def policy_teacher(run_dir: Path, which: str, meta: SuiteMeta, threads: int) -> PolicyTeacher:
    """Build a run's policy with the weights of a checkpoint.

    Args:
        run_dir: The run's folder.
        which: ``"latest"`` or ``"best"``.
        meta: The suite to record in, which must be the run's.
        threads: CPU threads of torch.

    Raises:
        FileNotFoundError: the folder is no run, or it has no checkpoint.
        ValueError: the run's suite is another one, or ``which`` is unknown.
    """
    if which not in ("latest", "best"):
        raise ValueError(f"which is {which!r}, must be 'latest' or 'best'")
    if not (run_dir / "config.yaml").is_file():
        raise FileNotFoundError(f"{run_dir} is no run folder: it has no config.yaml")
    cfg = OmegaConf.load(run_dir / "config.yaml")
    trained_on = instantiate(cfg.env).meta
    if trained_on != meta:
        raise ValueError(
            f"{run_dir} was trained on {trained_on}, env here is {meta}: use the run's env settings"
        )
    policy = instantiate(cfg.policy)(meta)
    checkpoints = Checkpointer(run_dir / "checkpoints")
    path = checkpoints.latest() if which == "latest" else checkpoints.best()
    if path is None:
        raise FileNotFoundError(f"{run_dir} has no complete checkpoint yet")
    ranks = topology.start("cpu", threads=threads)
    try:
        checkpoints.load(path, {"modules": {"evaluated": policy}}, ranks)
    finally:
        ranks.stop()
    return PolicyTeacher(policy.eval())


def successes(
    tried: Iterable[Episode | None], wanted: int, meta: SuiteMeta, counts: Counter[str]
) -> Iterator[Episode]:
    """Yield the first ``wanted`` successes; count attempts and successes per task name.

    Raises:
        RuntimeError: ``tried`` ends before.
    """
    for episode in tried:
        counts["attempts"] += 1
        if episode is None:
            continue
        counts["successes"] += 1
        counts[meta.task_names[episode.task_id]] += 1
        yield episode
        if counts["successes"] == wanted:
            return
    raise RuntimeError(
        f"{counts['successes']} of {counts['attempts']} attempts succeeded, episodes is {wanted}: "
        "raise max_attempts or lower noise; nothing was written"
    )


def positive(name: str, value: int) -> int:
    """Return ``value`` if it is at least 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}, must be at least 1")
    return value


@hydra.main(version_base="1.3", config_path="../conf", config_name="demos")
def main(cfg: DictConfig) -> None:
    """Compose, check, record."""
    wanted = positive("episodes", cfg.episodes)
    tries = positive("max_attempts", cfg.max_attempts or 3 * wanted)
    suite = instantiate(cfg.env)
    if cfg.split not in suite.splits:
        raise ValueError(f"split is {cfg.split!r}, the suite has {sorted(suite.splits)}")
    if Path(cfg.out).exists():
        raise FileExistsError(f"out={cfg.out} exists: choose a new folder or remove it")
    teacher: Teacher = expert_teacher
    if cfg.checkpoint is not None:
        teacher = policy_teacher(Path(cfg.checkpoint), cfg.which, suite.meta, cfg.threads)
    first = suite.splits[cfg.split].start + cfg.first_state
    simulators = suite.simulators(1)
    tried = attempts(
        simulators,
        range(first, first + tries),
        teacher=teacher,
        noise=OmegaConf.to_object(cfg.noise) if OmegaConf.is_config(cfg.noise) else cfg.noise,
        seed=cfg.seed,
        max_steps=cfg.max_steps,
    )
    counts: Counter[str] = Counter()
    kept = successes(tried, wanted, suite.meta, counts)
    write_demonstrations(cfg.out, kept, suite.meta, video=cfg.video, crf=cfg.crf)
    simulators.close()
    per_task = ", ".join(f"{name} {counts[name]}" for name in dict.fromkeys(suite.meta.task_names))
    print(
        f"{cfg.out}: {counts['successes']} successes of {counts['attempts']} attempts ({per_task})"
    )


if __name__ == "__main__":
    main()
