"""Videos decoded back: every frame, its colours, its captions, and what a crash leaves."""

import av
import numpy as np
import pytest

from torchrl_vla import video
from torchrl_vla.video import BAND, OUTCOME_COLOURS, EpisodeVideo, GridVideo, caption


def decode(path):
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return frames, stream.average_rate, stream.codec_context


def corners():
    """4x4 with a red corner at [0, 0], green at [0, 3], blue at [3, 3], orange at [2, 1]."""
    frame = np.zeros((4, 4, 3), np.uint8)
    frame[0, 0], frame[0, 3], frame[3, 3] = (255, 0, 0), (0, 255, 0), (0, 0, 255)
    frame[2, 1] = (200, 120, 40)
    return frame


def test_colours_stay_rgb_and_corners_stay_where_they_were(tmp_path):
    with EpisodeVideo(tmp_path / "a.mp4", fps=20) as film:
        for _ in range(5):
            film.add(corners(), "push the red block")
    frames, rate, context = decode(tmp_path / "a.mp4")
    assert len(frames) == film.frames == 5
    assert rate == 20
    assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
    # 4 pixels become 256: a factor of 64, so the centre of pixel [r, c] is [64 r + 32, 64 c + 32]
    for (row, column), colour in {
        (0, 0): (255, 0, 0),
        (0, 3): (0, 255, 0),
        (3, 3): (0, 0, 255),
        (2, 1): (200, 120, 40),
        (1, 1): (0, 0, 0),
    }.items():
        pixel = frames[0][64 * row + 32, 64 * column + 32].astype(int)
        assert np.abs(pixel - colour).max() <= 6, (row, column, pixel)


def test_frames_come_back_in_order_and_the_last_is_held_with_its_outcome(tmp_path):
    greys = [10, 90, 170, 250]
    with EpisodeVideo(tmp_path / "a.mp4", fps=10) as film:
        for grey in greys:
            film.add(np.full((64, 300, 3), grey, np.uint8), "reach")
        film.finish("FAILURE")
    frames, _, _ = decode(tmp_path / "a.mp4")
    assert len(frames) == 4 + 7  # 0.7 s at 10 fps
    seen = [int(frame[:60].mean()) for frame in frames]
    assert seen == pytest.approx(greys + [250] * 7, abs=4)
    red = np.array(OUTCOME_COLOURS["FAILURE"])

    def reds(frame):
        return int((np.abs(frame[64:].astype(int) - red).max(-1) < 60).sum())

    assert reds(frames[3]) == 0
    assert reds(frames[4]) > 20
    assert reds(frames[-1]) > 20


def test_episodes_may_follow_each_other_but_not_without_frames(tmp_path):
    frame = np.zeros((256, 256, 3), np.uint8)
    with EpisodeVideo(tmp_path / "a.mp4", fps=1) as film:
        film.add(frame, "one")
        film.finish("SUCCESS")  # 0.7 s at 1 fps: held for one frame
        with pytest.raises(ValueError, match="no frame in this episode"):
            film.finish("SUCCESS")
        film.add(frame, "two")
        film.finish("TIME OUT")
        with pytest.raises(ValueError, match="'WON' is none of"):
            film.finish("WON")
    assert len(decode(tmp_path / "a.mp4")[0]) == 4


def test_the_name_appears_only_when_closed(tmp_path):
    path = tmp_path / "deep" / "a.mp4"
    film = EpisodeVideo(path, fps=10)
    film.add(np.zeros((256, 256, 3), np.uint8))
    assert not path.exists()
    film.close()
    film.close()
    assert [entry.name for entry in path.parent.iterdir()] == ["a.mp4"]
    with pytest.raises(RuntimeError, match="closed"):
        film.add(np.zeros((256, 256, 3), np.uint8))


def fail_after_one_frame(path):
    with EpisodeVideo(path, fps=10) as film:
        film.add(np.zeros((256, 256, 3), np.uint8))
        raise KeyError("simulator")


def test_an_exception_leaves_the_older_video_and_no_rubbish(tmp_path):
    (tmp_path / "a.mp4").write_bytes(b"older")
    with pytest.raises(KeyError, match="simulator"):
        fail_after_one_frame(tmp_path / "a.mp4")
    assert (tmp_path / "a.mp4").read_bytes() == b"older"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_video_without_frames_is_an_error_and_leaves_nothing(tmp_path):
    film = EpisodeVideo(tmp_path / "a.mp4", fps=10)
    with pytest.raises(ValueError, match="at least one frame"):
        film.close()
    assert list(tmp_path.iterdir()) == []


def test_frames_reach_the_disk_while_the_video_is_open(tmp_path):
    noise = np.random.default_rng(0)
    film = EpisodeVideo(tmp_path / "a.mp4", fps=10)
    sizes = []
    for _ in range(3):
        for _ in range(40):
            film.add(noise.integers(0, 256, (96, 256, 3), np.uint8))
        (part,) = tmp_path.iterdir()
        sizes.append(part.stat().st_size)
    film.close()
    # An encoder that hoarded the frames would leave the file as it began.
    assert sizes[0] < sizes[1] < sizes[2]
    assert sizes[2] > 500_000


def test_another_encoder_is_used_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "CODECS", ("no_such_codec", "mpeg4"))
    with pytest.warns(UserWarning, match="no_such_codec"):
        film = EpisodeVideo(tmp_path / "a.mp4", fps=10)
    for _ in range(3):
        film.add(corners())
    film.close()
    frames, _, context = decode(tmp_path / "a.mp4")
    assert (len(frames), context.name) == (3, "mpeg4")
    assert np.abs(frames[0][32, 32].astype(int) - (255, 0, 0)).max() <= 8
    monkeypatch.setattr(video, "CODECS", ("no_such_codec",))
    with pytest.raises(RuntimeError, match="none of the encoders"):
        EpisodeVideo(tmp_path / "b.mp4", fps=10)


@pytest.mark.parametrize(
    ("frame", "error", "match"),
    [
        (np.zeros((8, 8, 3), np.float32), TypeError, "float32"),
        (np.zeros((3, 8, 8), np.uint8), ValueError, r"\(3, 8, 8\).*permute"),
        (np.zeros((8, 8), np.uint8), ValueError, r"\(8, 8\)"),
    ],
)
def test_what_is_not_a_frame_is_refused(tmp_path, frame, error, match):
    film = EpisodeVideo(tmp_path / "a.mp4", fps=10)
    with pytest.raises(error, match=match):
        film.add(frame)
    film.discard()


def test_a_changed_frame_size_and_a_wrong_file_are_refused(tmp_path):
    with EpisodeVideo(tmp_path / "a.mp4", fps=10) as film:
        film.add(np.zeros((256, 256, 3), np.uint8))
        with pytest.raises(ValueError, match=r"frame 1 .*\(128, 256, 3\)"):
            film.add(np.zeros((128, 256, 3), np.uint8))
    with pytest.raises(ValueError, match=r"a\.gif"):
        EpisodeVideo(tmp_path / "a.gif", fps=10)
    with pytest.raises(ValueError, match="fps=0"):
        EpisodeVideo(tmp_path / "b.mp4", fps=0)


@pytest.mark.parametrize("size", [(64, 64), (255, 257), (480, 640), (9, 3)])
def test_a_caption_keeps_the_picture_and_gives_even_sizes(size):
    frame = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    plain, told = caption(frame, []), caption(frame, ["push the red block", "SUCCESS"])
    assert plain.shape == told.shape
    assert plain.shape[0] % 2 == 0
    assert plain.shape[1] % 2 == 0
    factor = -(-256 // size[1])
    height, width = size[0] * factor, size[1] * factor
    for out in (plain, told):
        assert (out[:height:factor, :width:factor] == frame).all()
    assert (plain[height:] == BAND).all()
    assert (told[height:] != plain[height:]).any()


def test_long_captions_shrink_and_endless_ones_are_refused():
    frame = np.zeros((64, 256, 3), np.uint8)
    long = "pick up the small green cube and put it gently beside the tall yellow cylinder " * 2
    out = caption(frame, [long, "TIME OUT"], OUTCOME_COLOURS["TIME OUT"])
    inked = (out[64:] != BAND).any(-1)
    assert inked.any()
    assert not inked[-2:].any()  # nothing runs out of the band
    assert not inked[:, -2:].any()
    with pytest.raises(ValueError, match="a caption of 5000 characters does not fit"):
        caption(frame, ["x" * 5000])


def test_a_grid_refuses_what_it_cannot_show(tmp_path):
    with pytest.raises(ValueError, match="tiles=0"):
        GridVideo(tmp_path / "a.mp4", fps=10, tiles=0)
    frame = np.zeros((16, 16, 3), np.uint8)
    with GridVideo(tmp_path / "a.mp4", fps=10, tiles=2) as grid:
        with pytest.raises(ValueError, match="no tile shows a frame"):
            grid.write()
        with pytest.raises(ValueError, match="tile 1 shows no frame"):
            grid.finish(1, "SUCCESS")
        grid.show(1, frame, "one")
        with pytest.raises(ValueError, match=r"frame 0 has shape \(8, 8, 3\), .* \(16, 16, 3\)"):
            grid.show(0, np.zeros((8, 8, 3), np.uint8), "two")
        with pytest.raises(ValueError, match="'WON' is none of"):
            grid.finish(1, "WON")
        grid.write(3)
    assert len(decode(tmp_path / "a.mp4")[0]) == grid.frames == 3
    with pytest.raises(RuntimeError, match="closed; open a new GridVideo"):
        grid.write()
