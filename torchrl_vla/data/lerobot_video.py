"""Camera frames in mp4 files, as LeRobot stores them: many episodes back to back, exact frames.

Not for looking at (``torchrl_vla/video.py`` films episodes): no captions, and every frame must come
back from its number.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.frame import PictureType

CODECS = {"libsvtav1": "av1", "libx264": "h264"}
"""Encoders in order of preference, with the codec's name in ``info.json``."""
OPTIONS = {
    "libsvtav1": {"g": "2", "preset": "12"},
    "libx264": {"g": "2", "bf": "0", "preset": "veryfast"},
}
"""Key frames at most 2 apart, so that any frame is near one."""
TOLERANCE = 1e-4
"""Distance between a frame's time and its row's time that is still the same frame [s]."""


def choose_encoder() -> str:
    """Return the first encoder of :data:`CODECS` that this PyAV has.

    Raises:
        RuntimeError: it has none of them.
    """
    for encoder in CODECS:
        if encoder in av.codecs_available:
            return encoder
    raise RuntimeError(
        f"this PyAV has none of the encoders {tuple(CODECS)}: install PyAV's own wheel "
        "(pip install av), or store images in parquet"
    )


class VideoFile:
    """An mp4 that episodes are appended to; every episode begins with a key frame.

    Args:
        path: The file; its folder is made.
        size: Height and width [px], both even.
        fps: Frames per second.
        encoder: Key of :data:`CODECS`.
        crf: Constant rate factor of the encoder: lower is better and larger.

    Raises:
        ValueError: an odd height or width, which 4:2:0 video cannot hold.
    """

    def __init__(self, path: Path, size: tuple[int, int], fps: int, encoder: str, crf: int) -> None:
        if size[0] % 2 or size[1] % 2:
            raise ValueError(f"frames are {size[0]}x{size[1]} px, video needs even numbers: resize")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.frames = 0
        """Frames so far."""
        self.bytes = 0
        """Compressed bytes so far (the encoder holds a few frames back)."""
        self._tick = Fraction(1, fps)
        self._container = av.open(str(path), "w", format="mp4")
        options = OPTIONS[encoder] | {"crf": str(crf)}
        self._stream = self._container.add_stream(encoder, rate=fps, options=options)
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt = "yuv420p"

    def add_episode(self, images: np.ndarray) -> int:
        """Append frames, uint8 RGB ``[T, 3, h, w]``; return the number of the first."""
        first = self.frames
        for image in images:
            pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
            picture = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuv420p")
            picture.pts, picture.time_base = self.frames, self._tick
            if self.frames == first:
                picture.pict_type = PictureType.I
            self._mux(picture)
            self.frames += 1
        return first

    def _mux(self, picture: av.VideoFrame | None) -> None:
        packets = self._stream.encode(picture)
        self.bytes += sum(packet.size for packet in packets)
        self._container.mux(packets)

    def close(self) -> None:
        """Write what the encoder holds back."""
        self._mux(None)
        self._container.close()

    def discard(self) -> None:
        """Close without flushing: the file is to be deleted."""
        self._container.close()


def read_frames(path: Path, first: int, count: int, fps: float) -> np.ndarray:
    """Decode frames ``first .. first + count - 1``, counted in steps of ``1 / fps`` from time 0.

    Decoding starts at the key frame before, and frames are chosen by their time stamp: an episode
    that does not begin with a key frame is read as exactly as any other.

    Returns:
        uint8 RGB ``[count, 3, h, w]``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a frame is missing.
    """
    if not path.is_file():
        raise FileNotFoundError(f"video {path} is missing: the data set is not complete")
    images = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        tick = float(stream.time_base)
        slack = (TOLERANCE + 0.5 * tick) * fps
        container.seek(int(first / fps / tick), stream=stream, backward=True)
        for frame in container.decode(stream):
            offset = frame.pts * tick * fps - (first + len(images))
            if offset < -slack:
                continue
            if offset > slack:
                break
            images.append(frame.to_ndarray(format="rgb24"))
            if len(images) == count:
                return np.stack(images).transpose(0, 3, 1, 2)
    raise ValueError(
        f"{path}: frame {first + len(images)} ({(first + len(images)) / fps:.4f} s) is missing, "
        f"frames {first}..{first + count - 1} were asked for: the video does not fit its table"
    )
