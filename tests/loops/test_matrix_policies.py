"""Every policy family under the algorithms that fit it, from the launcher: short real trainings.

On two ranks (slow) also the lr = 0 self-check of every on-policy pair.
"""

import math
from pathlib import Path

import pytest
from launching import launch
from programs import ROOT, torchrun

from torchrl_vla.metrics import read_metrics

COMMON = (
    "topology.device=cpu",
    "evaluation.episodes=2",
    "evaluation.final_episodes=2",
    "evaluation.num_envs=1",
    "evaluation.videos=0",
    "evaluation.every_minutes=99",
    "checkpoint.every_minutes=99",
    "budget.minutes=20",
)
ON_POLICY = (
    "budget.updates=2",
    "algo.actors.num_workers=1",
    "algo.actors.envs_per_worker=4",
    "algo.actors.decisions_per_env=2",
    "algo.actors.timeout=200",
    "algo.updates.minibatch_size=4",
    "algo.updates.epochs=1",
)
GROUPS = (
    "algo.actors.group_size=2",
    "algo.actors.decisions_per_env=12",
    "algo.objective.min_groups=1",
    "algo.objective.dynamic_sampling=false",
)
OFF_POLICY = (
    "budget.updates=4",
    "budget.env_steps=null",
    "algo.actors.num_workers=1",
    "algo.actors.envs_per_worker=2",
    "algo.actors.decisions_per_env=2",
    "algo.actors.timeout=200",
    "algo.replay.capacity=64",
    "algo.replay.batch_size=8",
    "algo.replay.demonstration_episodes=2",
    "algo.replay.min_decisions=4",
    "algo.replay.n_steps=1",
    "algo.pace.warm_up_updates=1",
    "algo.pace.slack_decisions=8",
    "algo.pace.publish_updates=2",
)
CLONING = ("budget.updates=2", "algo.demonstrations_per_task=1", "algo.batch_size=8")
FAST = "policy.steps=3"
PAIRS = {
    "ppo oft": ("ppo", ("policy=openvla_oft_tiny", *ON_POLICY), {"loss_policy", "loss_value"}),
    "ppo vlm": ("ppo", ("policy=vlm_tiny", *ON_POLICY), {"loss_policy", "loss_value"}),
    "ppo pi0": ("ppo_flow", (FAST, *ON_POLICY), {"loss_policy", "loss_value", "grad_norm/head"}),
    "grpo pi0": ("grpo_flow", (FAST, *ON_POLICY, *GROUPS), {"loss_policy", "grad_norm/head"}),
    "sac pi0": ("sac_flow", (FAST, *OFF_POLICY), {"loss_critic", "loss_actor", "loss_cloning"}),
    "td3_bc pi0": (
        "td3_bc_flow",
        (FAST, *OFF_POLICY),
        {"loss_critic", "loss_actor", "loss_cloning"},
    ),
    "bc oft": ("bc", ("policy=openvla_oft_tiny", *CLONING), {"loss_cloning"}),
    "bc oft l1": ("bc_l1", CLONING, {"loss_cloning", "grad_norm/policy"}),
    "bc pi0": ("bc_flow", (FAST, *CLONING), {"loss_cloning", "grad_norm/policy", "grad_norm/head"}),
    "bc vlm flow": ("bc_flow", ("policy=vlm_tiny", FAST, *CLONING), {"loss_cloning"}),
}


def check_rows(folder: Path, names: set[str]) -> None:
    rows = [row for row in read_metrics(folder) if row["update"]]
    assert rows
    seen = {name: [row[name] for row in rows if name in row] for name in names}
    for name, values in seen.items():
        assert values, name
        assert all(map(math.isfinite, values)), name
    assert list((folder / "checkpoints").iterdir())


SLOW_PAIRS = ("ppo vlm", "ppo pi0", "sac pi0", "td3_bc pi0")  # much as those that are left


@pytest.mark.parametrize(
    "pair", [pytest.param(p, marks=pytest.mark.slow if p in SLOW_PAIRS else ()) for p in PAIRS]
)
def test_one_process(pair: str, tmp_path: Path):
    algorithm, overrides, names = PAIRS[pair]
    launch(f"algo={algorithm}", f"run_dir={tmp_path / 'run'}", *COMMON, *overrides)
    check_rows(tmp_path / "run", names)


TWO_RANKS = ("ppo oft", "ppo vlm", "grpo pi0", "sac pi0", "td3_bc pi0")


def train(*overrides: str) -> str:
    """Train on two gloo ranks; return what was printed."""
    program = ROOT / "launch" / "train.py"
    return torchrun(program, "logger.display=false", *overrides, timeout=1500).stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", TWO_RANKS)
def test_two_ranks(pair: str, tmp_path: Path):
    algorithm, overrides, names = PAIRS[pair]
    train(f"algo={algorithm}", f"run_dir={tmp_path / 'run'}", *COMMON, *overrides)
    check_rows(tmp_path / "run", names)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pair", ["ppo oft", "ppo vlm", "ppo pi0", "grpo pi0"])
def test_every_ratio_is_one_on_two_ranks(pair: str, tmp_path: Path):
    algorithm, overrides, _ = PAIRS[pair]
    folder = f"run_dir={tmp_path / 'run'}"
    said = train(f"algo={algorithm}", "check=ratio", folder, *COMMON, *overrides)
    assert f"check=ratio {algorithm}: passed in float32" in said
    assert "2 ranks" in said
