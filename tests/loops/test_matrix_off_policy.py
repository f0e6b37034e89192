"""Every off-policy algorithm and every cloning loss on the tabletop suite: small real trainings."""

import math
from pathlib import Path

import pytest
from launching import launch

from torchrl_vla.metrics import read_metrics

COMMON = (
    "topology.device=cpu",
    "evaluation.episodes=1",
    "evaluation.final_episodes=1",
    "evaluation.num_envs=1",
    "evaluation.videos=0",
    "evaluation.every_minutes=99",
    "checkpoint.every_minutes=99",
)
SMALL = (
    "budget.minutes=null",
    "budget.env_steps=null",
    "budget.updates=40",
    "algo.actors.envs_per_worker=4",
    "algo.actors.decisions_per_env=4",
    "algo.replay.capacity=400",
    "algo.replay.batch_size=32",
    "algo.replay.demonstration_episodes=3",
    "algo.replay.min_decisions=48",
    "algo.pace.warm_up_updates=10",
    "algo.pace.slack_decisions=64",
    "algo.pace.publish_updates=5",
)
EVERYWHERE = {
    "loss_critic",
    "loss_actor",
    "td_error",
    "q_mean",
    "q_std",
    "demonstration_share",
    "grad_norm/actor",
    "grad_norm/critic",
    "lr/actor",
    "lr/critic",
    "policy_lag",
    "policy_lag_max",
    "replay/rows",
    "replay/positive_share",
    "env_steps",
    "episodes",
    "decisions",
    "wait/actors",
    "wait/learner",
}
ENTROPY = {"loss_alpha", "alpha", "entropy", "grad_norm/alpha", "lr/alpha"}
CASES = {
    "sac": ((), ENTROPY | {"loss_cloning"}),
    "rlpd": ((), ENTROPY | {"loss_cloning"}),
    "rlpd without cloning": (
        ("algo.objective.cloning_weight=0", "algo.objective.cloned_rows=null"),
        ENTROPY,
    ),
    "cql": ((), ENTROPY | {"loss_cloning", "loss_conservative"}),
    "td3_bc": ((), {"loss_cloning", "q_weight"}),
    "sac by class": (
        (
            "algo.replay.positive_share=0.5",
            "algo.replay.actor_positive_share=0.8",
            "algo.replay.balance_tasks=true",
            "algo.replay.max_policy_lag=100",
            "algo.objective.alpha_kind=softplus",
            "algo.objective.target_entropy=-2.0",
            "algo.objective.entropy_unit=executed_number",
        ),
        ENTROPY | {"loss_cloning"},
    ),
    "sac on images": (("algo.updates.trunk_lr=1e-4", "algo.replay.n_steps=1"), ENTROPY),
}


def cases(names: dict[str, object]) -> list[object]:
    """Algorithms as shipped by default; their variants when slow tests are asked for."""
    return [pytest.param(n, marks=[pytest.mark.slow] if " " in n else []) for n in names]


@pytest.mark.parametrize("case", cases(CASES))
def test_off_policy(case: str, tmp_path: Path):
    overrides, names = CASES[case]
    launch(f"algo={case.split()[0]}", f"run_dir={tmp_path / 'run'}", *COMMON, *SMALL, *overrides)
    rows = [row for row in read_metrics(tmp_path / "run") if row["update"]]
    assert rows[-1]["update"] == 40
    moving = [row for row in rows if row["update"] > 10]
    for name in EVERYWHERE | names:
        values = [row[name] for row in moving]
        assert all(map(math.isfinite, values)), name
    last = rows[-1]
    assert last["demonstration_share"] == 0.5
    assert last["policy_lag"] >= 0
    assert last["env_steps"] > 0
    # the outcome of some episodes is known by now, and Q of them is a statistic of its own
    assert any(math.isfinite(row["q_success"]) for row in rows)
    # targets lie within the return's range; a critic that learns is not far outside it
    assert abs(last["q_mean"]) < 3
    assert last["td_error"] < max(row["td_error"] for row in rows)


CLONING = {
    "bc": (),
    "bc hard": ("algo.objective.labels=hard", "algo.objective.label_sigma=null"),
    "bc_gaussian": (),
    "bc_gaussian l1": ("algo.objective.loss=l1",),
    "bc_gaussian nll": ("algo.objective.loss=nll", "algo.objective.target_std=null"),
}


@pytest.mark.parametrize("case", cases(CLONING))
def test_cloning(case: str, tmp_path: Path):
    launch(
        f"algo={case.split()[0]}",
        f"run_dir={tmp_path / 'run'}",
        *COMMON,
        "budget.updates=60",
        "algo.demonstrations_per_task=2",
        "algo.batch_size=32",
        "algo.epochs=40",
        "algo.lr=1e-3",
        "algo.warm_up=5",
        *CLONING[case],
    )
    rows = [row for row in read_metrics(tmp_path / "run") if "loss_cloning" in row]
    losses = [row["loss_cloning"] for row in rows]
    assert all(map(math.isfinite, losses))
    # the shipped start has seen such demonstrations; these few are fitted more closely still
    assert losses[-1] < losses[0]
