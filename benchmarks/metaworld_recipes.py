"""Success on Meta-World before and after RL: expert episodes, cloning, then PPO, per task and seed.

Runs the recipes of ``conf/experiment`` as a user does and judges both policies on the same held-out
states, which had no part in training or in choosing a checkpoint:

    OMP_NUM_THREADS=1 python benchmarks/metaworld_recipes.py --seeds 0 1 2

A finished step is not repeated, so a run that was cut short goes on from its last step (whose CPU
minutes are then those of the rest). They count all processes of a step and its short evaluations,
not the judging and not the recording of the demonstrations, which all seeds of a task share.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from torchrl_vla.data.lerobot_demonstrations import read_demonstrations
from torchrl_vla.evaluate import compare
from torchrl_vla.policies.weights import save_weights

ROOT = Path(__file__).parents[1]
FRESH = 1000
"""Offset of the states that judge, far behind those of the runs' own evaluations."""
LOOKS = (
    "logger.display=false",
    "evaluation.videos=0",
    "evaluation.episodes=20",
    "evaluation.final_episodes=20",
    "evaluation.every_minutes=99",
)
"""What the runs themselves look at: little, since it counts as their CPU time."""


def run(program: str, *overrides: str, log: Path) -> float:
    """Run ``launch/PROGRAM.py``; return its CPU minutes, children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with log.open("a") as file:
        subprocess.run(
            [sys.executable, str(ROOT / "launch" / f"{program}.py"), *overrides],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=file,
            check=True,
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds / 60


def settings(task: str) -> list[str]:
    """Return the recipe's environment as overrides for ``launch/demos.py``."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", ["experiment=metaworld_bc", f"task={task}"])
    names = ("cameras", "image_size", "max_steps")
    values = [
        f"env.{name}={json.dumps(list(v)) if name == 'cameras' else v}"
        for name, v in ((name, cfg.env[name]) for name in names)
    ]
    return ["env=metaworld", f"task={task}", *values]


def start_weights(task: str, demonstrations: Path, seed: int, out: Path) -> None:
    """Write random weights that know mean and spread of the demonstrations' states."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("train", ["experiment=metaworld_bc", f"task={task}"])
    suite = instantiate(cfg.env)
    episodes = read_demonstrations(suite.meta, folder=demonstrations)
    state = torch.cat([episode.state for episode in episodes])
    torch.manual_seed(seed)
    policy = instantiate(cfg.policy)(suite.meta)
    model = policy.model.model
    model.state_mean.copy_(state.mean(0))
    model.state_std.copy_(state.std(0).clamp_min(1e-3))
    recipe = {"stage": "start", "seed": seed}
    save_weights(out, modules=policy.parts(), vocabulary=policy.model.vocabulary, recipe=recipe)


def judge(folder: Path, args: argparse.Namespace, log: Path) -> dict:
    """Evaluate a run's last checkpoint on the fresh states."""
    out = folder / "fresh.json"
    if not out.exists():
        states = (f"first_state={FRESH}", f"episodes={args.states}", "num_envs=4")
        run("evaluate", f"checkpoint={folder}", f"out={out}", *states, log=log)
    return json.loads(out.read_text())


def demonstrate(task: str, args: argparse.Namespace) -> Path:
    """Record the expert's episodes of a task, if they are not there yet; return their folder."""
    folder = args.folder / f"demos-{task}"
    if not folder.exists():
        episodes = (f"episodes={args.demonstrations}", "noise=[0,0.3]")
        log = args.folder / f"demos-{task}.txt"
        run("demos", *settings(task), f"out={folder}", *episodes, log=log)
    return folder


def learn(task: str, seed: int, args: argparse.Namespace) -> dict[str, object]:
    """Clone, train, judge; return one row of the table."""
    folder = args.folder / f"{task}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    log, book = folder / "log.txt", folder / "minutes.json"
    demonstrations = demonstrate(task, args)
    start, cloned, tuned = folder / "start.safetensors", folder / "bc", folder / "ppo"
    if not start.exists():
        start_weights(task, demonstrations, seed, start)
    data = (
        "+dataset@algo.dataset=own",
        f"algo.dataset.folder={demonstrations}",
        "algo.demonstrations_per_task=null",
        "algo.noise=null",
    )
    steps = {
        "bc": (cloned, "experiment=metaworld_bc", f"policy.weights={start}", *data),
        "ppo": (
            tuned,
            "experiment=metaworld_ppo",
            f"policy.weights={cloned / 'policy.safetensors'}",
        ),
    }
    common = (f"task={task}", f"seed={seed}", "resume=auto", *LOOKS)
    for name, (out, *overrides) in steps.items():
        minutes = json.loads(book.read_text()) if book.exists() else {}
        if name not in minutes:
            minutes[name] = run("train", f"run_dir={out}", *overrides, *common, log=log)
            book.write_text(json.dumps(minutes))
    before, after = judge(cloned, args, log), judge(tuned, args, log)
    paired = compare(before, after)
    return {
        "task": task,
        "seed": seed,
        "before": [before["success_rate"], *before["interval"]],
        "after": [after["success_rate"], *after["interval"]],
        "p": paired.p_value,
        "cpu_minutes": json.loads(book.read_text()),
    }


def main() -> None:
    """Run every task and seed, print a row each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=["reach-v3", "drawer-open-v3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--demonstrations", type=int, default=50)
    parser.add_argument("--states", type=int, default=100, help="that judge")
    parser.add_argument("--folder", type=Path, default=Path("runs/metaworld"))
    parser.add_argument("--out", type=Path, default=None, help="write the rows here as JSON")
    args = parser.parse_args()
    if importlib.util.find_spec("metaworld") is None:
        print("nothing measured: this needs pip install 'torchrl_vla[metaworld]'")
        return
    rows = []
    for task in args.tasks:
        for seed in args.seeds:
            rows.append(learn(task, seed, args))
            print(describe(rows[-1]), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(rows, indent=1))


def describe(row: dict) -> str:
    """Return one line of the table."""
    rates = [
        f"{100 * rate:.0f} % ({100 * low:.0f}-{100 * high:.0f})"
        for rate, low, high in (row["before"], row["after"])
    ]
    minutes = ", ".join(f"{name} {value:.1f}" for name, value in row["cpu_minutes"].items())
    return (
        f"{row['task']:<16} seed {row['seed']}: {rates[0]} -> {rates[1]}, p = {row['p']:.4f}; "
        f"CPU minutes: {minutes}"
    )


if __name__ == "__main__":
    main()
