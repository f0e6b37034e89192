"""``launch/evaluate.py`` on a run's folder: the report, the best checkpoint, and watching a run."""

import json
from pathlib import Path

import av
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from programs import composed, program

from torchrl_vla import topology
from torchrl_vla.checkpoint import Checkpointer

HISTORY = [{"episodes": 3, "success_rate": 0.3}, {"episodes": 2, "success_rate": 0.5}]


evaluation = program("evaluate")


def evaluate(folder: Path, *overrides: str) -> None:
    evaluation.main.__wrapped__(
        composed(f"checkpoint={folder}", "episodes=2", "num_envs=1", *overrides, name="evaluate")
    )


def save(folder: Path, step: int, score: float) -> None:
    """Save the shipped weights as a checkpoint of the run in ``folder``."""
    cfg = OmegaConf.load(folder / "config.yaml")
    policy = instantiate(cfg.policy)(instantiate(cfg.env).meta)
    ranks = topology.start("cpu")
    state = {"modules": {"evaluated": policy}, "json": {"history": HISTORY}}
    Checkpointer(folder / "checkpoints").save(step, state, score=score, topology=ranks)
    ranks.stop()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with two checkpoints, of which the first is the best."""
    cfg = composed("algo=ppo")
    OmegaConf.save(cfg, tmp_path / "config.yaml", resolve=True)
    save(tmp_path, 1, 0.5)
    save(tmp_path, 2, 0.3)
    return tmp_path


def test_the_report_says_what_the_rate_depends_on(run: Path, tmp_path: Path, capsys):
    out = tmp_path / "a.json"
    evaluate(run, f"out={out}")
    report = json.loads(out.read_text())
    assert report["checkpoint"] == "step-000000002"
    assert report["selection"] == {"rule": "latest", "looks": 0, "biased": False}
    assert report["list"]["cases"] == len(report["results"]) == 2
    environment = report["environment"]
    assert len(environment["assets_sha256"]) == 64
    assert ";" in environment["renderer"]
    assert environment["eval_decode"] == "mean"
    assert {"statistics_sha256", "precision"} <= report["policy"].keys()
    assert not environment.keys() & report["policy"].keys()
    assert {"torch", "mujoco", "cpu"} <= report["versions"].keys()
    assert "too high" not in capsys.readouterr().out
    # the same again, with other simulators side by side
    evaluate(run, f"out={tmp_path / 'b.json'}", "num_envs=3")
    again = json.loads((tmp_path / "b.json").read_text())
    assert again["results"] == report["results"]
    assert again["list"] == report["list"]


def test_the_best_of_several_looks_is_named_as_such(run: Path, tmp_path: Path, capsys):
    out = tmp_path / "a.json"
    evaluate(run, f"out={out}", "which=best")
    report = json.loads(out.read_text())
    assert report["checkpoint"] == "step-000000001"
    chosen = report["selection"]
    assert (chosen["looks"], chosen["states"], chosen["biased"]) == (2, 3, True)
    assert "best of 2 looks at some of these states" in capsys.readouterr().out
    evaluate(run, f"out={out}", "which=best", "first_state=3", "episodes=1")
    assert not json.loads(out.read_text())["selection"]["biased"]
    assert "too high" not in capsys.readouterr().out


def test_sampled_decodes_by_seed(run: Path, tmp_path: Path):
    out = tmp_path / "a.json"
    evaluate(run, f"out={out}", "episodes=1", "seeds=[0,7]", "eval_decode=sample")
    report = json.loads(out.read_text())
    assert [row["seed"] for row in report["results"]] == [0, 7]
    assert len({row["trace"] for row in report["results"]}) == 2
    assert report["environment"]["eval_decode"] == "sample"
    assert report["settings"]["seeds"] == [0, 7]


def test_a_grid_of_the_first_episodes(run: Path, tmp_path: Path):
    path = tmp_path / "a.mp4"
    evaluate(run, "episodes=1", f"video={path}", "video_layout=grid", "video_episodes=2")
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert frames[0].shape == (308, 512, 3)
    assert len(frames) > 14  # one decision and the held picture, at least
    assert frames[0][:256].std() > 10  # something is to be seen


def test_watching_evaluates_each_checkpoint_once(run: Path, monkeypatch):
    evaluations = run / evaluation.FOLDER
    save(run, 3, 0.1)
    third = (run / "checkpoints" / "step-000000003").rename(run / "third")
    found = []

    def wait(seconds: float) -> None:
        """Instead of waiting 30 s: the training publishes its third checkpoint."""
        if seconds != 30.0:  # somebody else's
            return
        found.append(sorted(path.stem for path in evaluations.iterdir()))
        if third.exists():
            third.rename(run / "checkpoints" / "step-000000003")

    monkeypatch.setattr(evaluation.time, "sleep", wait)
    settings = ("watch=true", "watch_seconds=30", "watch_minutes=1", "episodes=1")
    evaluate(run, *settings)
    assert found == [["step-000000002"]] + [["step-000000002", "step-000000003"]] * 2
    written = evaluations / "step-000000003.json"
    assert json.loads(written.read_text())["list"]["cases"] == 1
    # a watcher that is started again leaves what is there
    written.write_text("{}")
    evaluate(run, *settings)
    assert written.read_text() == "{}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("seeds=[]",), "give at least one"),
        (("seeds=[1,1]",), "repeats one"),
        (("watch=true", "out=a.json"), "leave which=latest"),
        (("video_layout=rows",), "video_layout is 'rows', must be one of"),
        (("video=a.mp4", "video_episodes=0"), "video_episodes=0: film at least one"),
        (("which=newest",), "which is 'newest', must be 'latest' or 'best'"),
        (("eval_decode=wild",), "eval_decode is 'wild'"),
    ],
)
def test_settings_that_cannot_be(run: Path, overrides: tuple[str, ...], message: str):
    try:
        with pytest.raises(Exception, match=message):
            evaluate(run, *overrides)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
