"""The programs of ``launch/`` as modules, what a command line composes, and ranks of a program."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

ROOT = Path(__file__).parents[1]
ON_POLICY = ("ppo", "ppo_async", "grpo", "rloo", "reinforce_pp", "ppo_gaussian")


def program(name: str) -> ModuleType:
    """Import ``launch/NAME.py``, which is a program and in no package."""
    spec = importlib.util.spec_from_file_location(f"launch_{name}", ROOT / "launch" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def composed(*overrides: str, name: str = "train") -> DictConfig:
    """Return ``conf/NAME.yaml`` with these overrides, as a command line gives it."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose(name, list(overrides))


def torchrun(
    program: Path | str,
    *arguments: object,
    ranks: int = 2,
    timeout: float = 280,
    check: bool = True,
) -> subprocess.CompletedProcess:
    """Run ``program`` on gloo ranks of this machine and wait for it.

    The helpers in ``tests/`` can be imported in it. With ``check`` it must end with 0.
    """
    places = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
    done = subprocess.run(
        [sys.executable, *launcher, str(program), *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done
