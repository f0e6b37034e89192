"""Films of evaluation: the expected value is drawn, a failing writer is only a warning."""

import gc

import numpy as np
import psutil
import pytest
import torch
from envs.counter import META, SPLITS, CounterSuite
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from torchrl_vla import schema
from torchrl_vla.evaluate import film, films, q_judge, run_episodes
from torchrl_vla.policies.tiny import make_policy
from torchrl_vla.video import EpisodeVideo, GridVideo

IDS = list(range(SPLITS["eval"].start, SPLITS["eval"].start + 2))


class Judging(TensorDictModuleBase):
    """Counts up; writes the decision's number as its state value."""

    def __init__(self, value: bool = True):
        super().__init__()
        self.in_keys, self.out_keys = [schema.IMAGE, schema.DECISION], [schema.CHUNK]
        self.value = value

    def forward(self, td):
        td.set(schema.CHUNK, torch.full((1, 4, 2), 0.5))
        if self.value:
            td.set("state_value", td[schema.DECISION].float())
        return td


@pytest.fixture
def notes(monkeypatch):
    """What is written below the frames."""
    seen = []

    class Noting(EpisodeVideo):
        def add(self, frame, instruction="", note=""):
            seen.append(note)
            super().add(frame, instruction, note)

    monkeypatch.setattr(films, "EpisodeVideo", Noting)
    return seen


def filmed(policy, path, **more):
    suite = CounterSuite(lengths=(6,))
    return film(policy, suite.simulators(1), IDS, path, chunk_size=4, size=64, **more)


def test_the_value_is_shown_until_the_next_decision(tmp_path, notes):
    filmed(Judging(), tmp_path / "a.mp4")
    assert notes == (["value 0.00"] * 4 + ["value 1.00"] * 2) * 2


def test_any_judgement_may_be_shown_and_none_where_there_is_none(tmp_path, notes):
    filmed(Judging(), tmp_path / "a.mp4", judge=lambda td: f"Q {td[schema.CHUNK].sum():.1f}")
    assert set(notes) == {"Q 4.0"}
    notes.clear()
    filmed(Judging(value=False), tmp_path / "b.mp4")
    assert set(notes) == {""}


def test_the_least_q_of_an_ensemble(tmp_path, notes):
    torch.manual_seed(0)
    policy = make_policy(META, head="gaussian", weights=None)
    heads = policy.make_critics(3)
    suite = CounterSuite(lengths=(6,))
    settings = {"chunk_size": 4, "size": 64, "judge": q_judge(policy, heads)}
    film(policy, suite.simulators(1), IDS[:1], tmp_path / "a.mp4", **settings)
    simulators = suite.simulators(1)
    simulators.reset(0, IDS[0])
    td = TensorDict(batch_size=[1])
    td[schema.IMAGE] = torch.from_numpy(simulators.render(0))[None]
    td[schema.STATE] = torch.from_numpy(simulators.state(0))[None]
    td[schema.TASK_ID] = torch.tensor([[simulators.task_id(0)]])
    with torch.no_grad(), set_exploration_type(ExplorationType.DETERMINISTIC):
        features, chunk = policy.features(td), policy(td)[schema.CHUNK]
        values = [head(features, chunk).item() for head in heads]
    assert len({f"{value:.2f}" for value in values}) > 1
    assert notes[:4] == [f"Q {min(values):.2f}"] * 4


def expected():
    return run_episodes(Judging(), CounterSuite(lengths=(6,)).simulators(1), IDS, chunk_size=4)


def test_a_full_disk_costs_the_video_and_nothing_else(tmp_path):
    (tmp_path / ".a.mp4.part").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match=r"no video at .*a\.mp4: .*No space left"):
        results = filmed(Judging(), tmp_path / "a.mp4")
    assert results == expected()
    assert not any(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_costs_the_video_and_nothing_else(tmp_path):
    (tmp_path / "videos").write_text("a file")
    with pytest.warns(UserWarning, match="no video at"):
        results = filmed(Judging(), tmp_path / "videos" / "a.mp4")
    assert results == expected()


def test_a_failing_policy_is_no_affair_of_the_writer(tmp_path):
    def fail(td):
        raise ArithmeticError("a judge that fails")

    with pytest.raises(ArithmeticError):
        filmed(Judging(), tmp_path / "a.mp4", judge=fail)
    assert not any(tmp_path.iterdir())


def episode(path):
    """Return a video and what adds a frame to it."""
    video = EpisodeVideo(path, fps=20)
    return video, lambda frame: video.add(frame, "count")


def grid(path):
    video = GridVideo(path, fps=20, tiles=2)

    def add(frame):
        video.show(0, frame, "count")
        video.show(1, frame[::-1], "count")
        video.write()

    return video, add


@pytest.mark.parametrize("make", [episode, grid])
def test_memory_stays_flat(tmp_path, make):
    frames = np.random.default_rng(0).integers(0, 256, (8, 256, 256, 3), np.uint8)
    process = psutil.Process()
    video, add = make(tmp_path / "a.mp4")
    with video:
        for number in range(260):
            if number == 130:  # the encoder's own queue is full
                gc.collect()
                before = process.memory_info().rss
            add(frames[number % 8])
        gc.collect()
        grown = (process.memory_info().rss - before) / 2**20
    # 130 frames of 0.23 MiB are 30 MiB
    assert grown < 12
