"""``launch/demos.py`` from the command line's values to a data set on disk."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from programs import ROOT, composed, program

from torchrl_vla import topology
from torchrl_vla.checkpoint import Checkpointer
from torchrl_vla.data.lerobot import LeRobotDataset
from torchrl_vla.loops.run import Budget, EvaluationPlan, Run
from torchrl_vla.metrics import read_metrics

demos = program("demos")


def run(*overrides: str) -> None:
    demos.main.__wrapped__(composed(*overrides, name="demos"))


def test_the_experts_successes_are_written_and_read_back(tmp_path: Path, capsys):
    out = tmp_path / "set"
    run(f"out={out}", "episodes=3", "noise=[0,0.3]", "video=true")
    assert "3 successes of 3 attempts" in capsys.readouterr().out
    dataset = LeRobotDataset(out)
    assert len(dataset) == 3
    assert dataset.layout.features["observation.images.front"].dtype == "video"
    # Noise levels take turns: only the second episode did something else than the expert wanted.
    differ = []
    for number in range(3):
        columns = dataset.read(number, ["action", "action.executed"]).columns
        differ.append(bool((columns["action"] != columns["action.executed"]).any()))
    assert differ == [False, True, False]
    cfg = OmegaConf.load(ROOT / "conf/dataset/own.yaml")
    cfg.folder = str(out)
    suite = instantiate(composed(f"out={out}", name="demos").env)
    episodes = instantiate(cfg)(suite.meta)
    assert [e.init_state_id - suite.splits["demo"].start for e in episodes] == [0, 1, 2]


def cloning(folder: Path, out: Path, **changes: object):
    """The program's cloning loop on a data set, two epochs of small minibatches."""
    small = {"demonstrations_per_task": "null", "noise": "null", "epochs": 2, "batch_size": 8}
    cfg = composed(
        "algo=bc",
        "+dataset@algo.dataset=own",
        f"algo.dataset.folder={out}",
        *(f"algo.{key}={value}" for key, value in {**small, **changes}.items()),
    )
    ranks = topology.start("cpu")
    suite = instantiate(cfg.env)
    plan = EvaluationPlan(episodes=1, final_episodes=1, videos=0)
    loop_run = Run(folder, ranks, suite, 4, Budget(updates=10**6), plan, "bc", display=False)
    loop = OmegaConf.masked_copy(cfg.algo, [key for key in cfg.algo if key != "name"])
    try:
        instantiate(loop)(loop_run, seed=0, make_policy=instantiate(cfg.policy))
    finally:
        ranks.stop()


def test_cloning_reads_a_data_set_instead_of_the_expert(tmp_path: Path):
    out = tmp_path / "set"
    run(f"out={out}", "episodes=3")
    rows = sum(len(LeRobotDataset(out).read(n, ["action"]).columns["action"]) for n in range(3))
    cloning(tmp_path / "run", out)
    trained = [row for row in read_metrics(tmp_path / "run") if "loss_cloning" in row]
    # One sample per control step; an update takes 8 of them.
    assert trained[-1]["update"] == 2 * (rows // 8)
    with pytest.raises(
        ValueError, match=r"noise=0\.3 with a data set: .* settings of the scripted"
    ):
        cloning(tmp_path / "other", out, noise=0.3)


def make_run(folder: Path, weights: str) -> Path:
    """Leave a run's folder with a policy of the given weights in it."""
    cfg = composed("algo=bc", f"policy.weights={weights}")
    folder.mkdir()
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
    suite = instantiate(cfg.env)
    torch.manual_seed(0)
    policy = instantiate(cfg.policy)(suite.meta)
    ranks = topology.start("cpu")
    Checkpointer(folder / "checkpoints").save(1, {"modules": {"evaluated": policy}}, topology=ranks)
    ranks.stop()
    return folder


def test_a_policys_successes_are_written(tmp_path: Path, capsys):
    folder = make_run(tmp_path / "run", "shipped")  # solves about half of the states
    run(f"out={tmp_path / 'set'}", f"checkpoint={folder}", "episodes=2", "max_attempts=20")
    assert "2 successes of" in capsys.readouterr().out
    dataset = LeRobotDataset(tmp_path / "set")
    assert len(dataset) == 2
    actions = dataset.read(0, ["action"]).columns["action"]
    suite = instantiate(composed("out=x", name="demos").env)
    expert = suite.simulators(1)
    expert.reset(0, int(dataset.read(0, ["init_state_id"]).columns["init_state_id"][0]))
    assert not (actions[0] == expert.expert_action(0)).all()  # it was the policy that acted


def test_a_policy_without_success_leaves_nothing(tmp_path: Path):
    folder = make_run(tmp_path / "run", "null")
    out = tmp_path / "set"
    with pytest.raises(RuntimeError, match="0 of 2 attempts succeeded, episodes is 1"):
        run(f"out={out}", f"checkpoint={folder}", "episodes=1", "max_attempts=2", "max_steps=3")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with pytest.raises(ValueError, match="was trained on"):
        run(f"out={out}", f"checkpoint={folder}", "env.image_size=96")


def test_the_first_successes_are_taken():
    meta = instantiate(composed("out=x", name="demos").env).meta
    counts: Counter[str] = Counter()
    won = type("Won", (), {"task_id": 0})()
    tried = iter([None, won, None, won, won])
    assert list(demos.successes(tried, 2, meta, counts)) == [won, won]
    assert next(tried) is won  # the third was never asked for
    assert (counts["attempts"], counts["successes"], counts[meta.task_names[0]]) == (4, 2, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("episodes=0",), "episodes is 0"),
        (("split=test",), "split is 'test', the suite has"),
        (("noise=-1",), "noise is -1"),
        (("checkpoint=nowhere",), "nowhere is no run folder"),
        (("out=.",), r"out=\. exists"),
    ],
)
def test_bad_settings_are_refused(overrides, message: str, tmp_path: Path):
    with pytest.raises((ValueError, OSError), match=message):
        run(f"out={tmp_path / 'set'}", *overrides)
    assert list(tmp_path.iterdir()) == []
