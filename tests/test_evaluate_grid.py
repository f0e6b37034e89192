"""Grid films: every episode in its tile, at the right time, with instruction and outcome."""

from dataclasses import replace

import av
import numpy as np
import pytest
import torch
from envs.counter import META, SPLITS, CounterSuite
from tensordict.nn import TensorDictModuleBase

from torchrl_vla import schema
from torchrl_vla.evaluate import film_grid, run_episodes
from torchrl_vla.video import BAND, OUTCOME_COLOURS, WHITE

FIRST = SPLITS["eval"].start
PICTURE, BAND_HEIGHT = 256, 52
"""A frame of 64 px is enlarged by 4; below it are 4 lines of 13 px."""
HELD = 7
"""0.7 s at the 10 Hz of the counters."""


class Adding(TensorDictModuleBase):
    """Counts up; the state value is the number of the decision."""

    in_keys, out_keys = [schema.IMAGE, schema.DECISION], [schema.CHUNK]

    def forward(self, td):
        td.set(schema.CHUNK, torch.full((1, 4, 2), 0.5))
        td.set("state_value", td[schema.DECISION].float())
        return td


def filmed(suite, path, episodes, **more):
    ids = range(FIRST, FIRST + episodes)
    settings = {"chunk_size": 4, "size": 64, **more}
    return film_grid(Adding(), suite.simulators(episodes), ids, path, **settings)


def decoded(path):
    with av.open(str(path)) as container:
        rate = container.streams.video[0].average_rate
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)], rate


def tile(frame, index, columns=2):
    height = PICTURE + BAND_HEIGHT
    top, left = index // columns * height, index % columns * PICTURE
    return frame[top : top + height, left : left + PICTURE].astype(int)


def greys(frames, index):
    return [round(tile(frame, index)[: PICTURE - 8].mean()) for frame in frames]


def pixels(frame, index, colour):
    """How many pixels of a tile's caption have about this colour."""
    caption = tile(frame, index)[PICTURE:]
    return int((np.abs(caption - np.array(colour)).max(-1) < 60).sum())


def test_every_tile_plays_its_episode_and_keeps_its_last_frame(tmp_path):
    suite = CounterSuite(lengths=(2, 6, 5), successes=(True, False, True))
    results = filmed(suite, tmp_path / "a.mp4", 3)
    by_id = {result.init_state_id: result for result in results}
    assert {r.env_steps for r in results} == {2, 6, 5}
    frames, rate = decoded(tmp_path / "a.mp4")
    assert rate == 10
    assert len(frames) == 6 + HELD
    assert frames[0].shape == (2 * (PICTURE + BAND_HEIGHT), 2 * PICTURE, 3)
    for index in range(3):
        result = by_id[FIRST + index]
        shown = [10 * min(step, result.env_steps) for step in range(1, 7 + HELD)]
        assert greys(frames, index) == pytest.approx(shown, abs=4)
        colour = OUTCOME_COLOURS["SUCCESS" if result.success else "FAILURE"]
        told = [pixels(frame, index, colour) > 20 for frame in frames]
        assert told == [step > result.env_steps for step in range(1, 7 + HELD)]
        assert all(pixels(frame, index, WHITE) > 20 for frame in frames)  # the instruction
    # nine tiles would fill three rows; the fourth tile of three is empty
    assert np.abs(tile(frames[-1], 3) - np.array(BAND)).max() < 8


def test_the_episodes_are_those_of_the_evaluation(tmp_path):
    suite = CounterSuite(lengths=(2, 6, 5, 99))
    ids = range(FIRST, FIRST + 4)
    alone = run_episodes(Adding(), suite.simulators(1), ids, chunk_size=4)
    assert filmed(suite, tmp_path / "a.mp4", 4) == alone
    frames, _ = decoded(tmp_path / "a.mp4")
    assert len(frames) == META.max_steps + HELD
    late = [i for i, result in enumerate(alone) if result.outcome == "time out"]
    assert late
    for index in range(4):
        found = pixels(frames[-1], index, OUTCOME_COLOURS["TIME OUT"]) > 20
        assert found == (index in late)


def test_fast_control_is_shown_at_thirty_frames_per_second_at_most(tmp_path):
    suite = CounterSuite(lengths=(8,), meta=replace(META, control_hz=80.0))
    filmed(suite, tmp_path / "a.mp4", 1)
    frames, rate = decoded(tmp_path / "a.mp4")
    assert float(rate) == pytest.approx(80 / 3, abs=0.01)
    steps = [1, 4, 7]  # every third
    shown = [round(frame[: PICTURE - 8].mean()) for frame in frames[:3]]
    assert shown == pytest.approx([10 * step for step in steps], abs=4)
    assert len(frames) == 3 + round(0.7 * 80 / 3)


def test_an_episode_that_diverges_at_once_leaves_its_tile_empty(tmp_path):
    suite = CounterSuite(lengths=(6,), broken=(True, False))
    results = filmed(suite, tmp_path / "a.mp4", 2)
    broken = [result.outcome == "sim error" for result in results]
    assert sorted(broken) == [False, True]
    frames, _ = decoded(tmp_path / "a.mp4")
    assert len(frames) == 6 + HELD
    assert np.abs(tile(frames[-1], broken.index(True)) - np.array(BAND)).max() < 8
    told = pixels(frames[-1], broken.index(False), OUTCOME_COLOURS["SUCCESS"])
    assert told > 20


def test_a_full_disk_costs_the_video_and_nothing_else(tmp_path):
    suite = CounterSuite(lengths=(2, 6))
    (tmp_path / ".a.mp4.part").symlink_to("/dev/full")
    with pytest.warns(UserWarning, match=r"no video at .*a\.mp4: .*No space left"):
        results = filmed(suite, tmp_path / "a.mp4", 2)
    ids = range(FIRST, FIRST + 2)
    assert results == run_episodes(Adding(), suite.simulators(1), ids, chunk_size=4)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("count", "ids"), [(1, (0, 1)), (2, (0, 0)), (3, (0, 1))])
def test_every_state_needs_a_simulator_of_its_own(tmp_path, count: int, ids: tuple[int, ...]):
    states = [FIRST + i for i in ids]
    with pytest.raises(ValueError, match=f"{count} simulators for the initial states"):
        film_grid(
            Adding(),
            CounterSuite().simulators(count),
            states,
            tmp_path / "a.mp4",
            chunk_size=4,
        )
