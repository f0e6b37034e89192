"""Short real trainings whose actors ask a policy server, as they are launched."""

from pathlib import Path

import pytest
from launching import launch

from torchrl_vla.metrics import read_metrics

pytestmark = pytest.mark.slow  # whole programs with a server each

SMALL = (
    "topology.device=cpu",
    "topology.actors=server",
    "algo.actors.num_workers=2",
    "algo.actors.envs_per_worker=2",
    "evaluation.episodes=1",
    "evaluation.final_episodes=1",
    "evaluation.num_envs=1",
    "evaluation.videos=0",
    "budget.minutes=4",
)
OF = {
    "ppo": (
        "algo.actors.decisions_per_env=6",
        "algo.updates.minibatch_size=12",
        "algo.updates.warm_up=0",
        "budget.updates=6",
    ),
    "sac": (
        "algo.actors.decisions_per_env=4",
        "algo.replay.capacity=400",
        "algo.replay.batch_size=16",
        "algo.replay.demonstration_episodes=2",
        "algo.replay.min_decisions=16",
        "algo.pace.warm_up_updates=4",
        "algo.pace.slack_decisions=32",
        "algo.pace.publish_updates=4",
        "budget.env_steps=null",
        "budget.updates=24",
    ),
}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("algorithm", OF)
def test_a_short_training_at_a_policy_server(algorithm: str, tmp_path: Path):
    folder = tmp_path / "run"
    launch(f"algo={algorithm}", f"run_dir={folder}", *SMALL, *OF[algorithm])
    rows = [row for row in read_metrics(folder) if row["update"]]
    assert rows[-1]["update"] >= 6
    if algorithm == "ppo":
        # the server scored the actions with the weights that the learner had then
        assert max(row["ratio_gap"] for row in rows) < 1e-5
        assert all(row["policy_lag_max"] == 0 for row in rows)
    assert rows[-1]["version"] > 1
    assert all(row["actors/restarts"] == 0 for row in rows)


def test_lock_step_is_refused_at_a_server(tmp_path: Path):
    changes = ("experiment=lock_step", "topology.actors=server", "budget.updates=1")
    with pytest.raises(ValueError, match=r"topology\.actors=server.*use topology\.actors=local"):
        launch("algo=ppo", f"run_dir={tmp_path / 'run'}", *changes)
