"""Episodes as mp4 files: frames go in one by one, text is drawn below them, memory stays flat.

The room knows pixels and captions. It does not step environments, rotate images (a frame is shown
as it is given) or choose which episodes are worth filming. Colours are RGB everywhere.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import av
import numpy as np
from av.video.reformatter import Colorspace
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Outcome = Literal["SUCCESS", "FAILURE", "TIME OUT"]
Colour = tuple[int, int, int]

WHITE: Colour = (235, 235, 235)
BAND: Colour = (24, 24, 28)
OUTCOME_COLOURS: dict[Outcome, Colour] = {
    "SUCCESS": (80, 220, 120),
    "FAILURE": (255, 95, 85),
    "TIME OUT": (250, 190, 70),
}
HOLD_SECONDS = 0.7
MIN_WIDTH = 256
"""Narrower frames are enlarged by a whole factor, or captions could not be read."""
CODECS = ("libx264", "mpeg4")
"""In order of preference. H.264 plays in every browser; MPEG-4 part 2 only in players."""
_MIN_FONT = 7


class Mp4:
    """An mp4 that grows picture by picture, under a temporary name until it is closed.

    Use it as a context manager: an exception inside removes the unfinished file.

    Args:
        path: the ``.mp4`` to make; folders are created, an older file is replaced on close.
        fps: frames per second, positive.

    Raises:
        ValueError: another suffix or ``fps`` not positive.
        RuntimeError: this PyAV has no encoder of :data:`CODECS`.
    """

    def __init__(self, path: str | os.PathLike[str], fps: float) -> None:
        self.path = Path(path)
        if self.path.suffix != ".mp4":
            raise ValueError(f"{self.path} must end in .mp4, the only container written here")
        if not fps > 0:
            raise ValueError(f"fps={fps} must be positive")
        self.frames = 0
        """Frames written so far, held ones included."""
        self._fps = Fraction(fps).limit_denominator(1000)
        self._codec = _pick_codec()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = self.path.with_name(f".{self.path.name}.part")
        self._container = av.open(str(self._temporary), "w", format="mp4")
        self._stream: av.VideoStream | None = None

    @property
    def held_frames(self) -> int:
        """Frames for which an outcome is shown: :data:`HOLD_SECONDS` of them."""
        return max(1, round(HOLD_SECONDS * self._fps))

    def close(self) -> None:
        """Write what the encoder still holds and give the file its name. Safe to call twice.

        Raises:
            ValueError: no frame was ever added; nothing is left on disk.
        """
        if self._container is None:
            return
        if self._stream is None:
            self.discard()
            raise ValueError(f"{self.path} would be empty; add() at least one frame before close()")
        self._container.mux(self._stream.encode(None))
        self._container.close()
        self._container = None
        self._temporary.replace(self.path)

    def discard(self) -> None:
        """Give up: remove the unfinished file and leave an older one as it was."""
        if self._container is None:
            return
        container, self._container = self._container, None
        # Closing writes the index of a file that nobody wants; on a full disk it fails.
        with suppress(OSError, av.FFmpegError):
            container.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _encode(self, image: NDArray[np.uint8]) -> None:
        """Append uint8 RGB ``[h, w, 3]`` with even ``h`` and ``w``, the same ones every time."""
        if self._container is None:
            raise RuntimeError(f"{self.path} is closed; open a new {type(self).__name__}")
        if self._stream is None:
            self._stream = self._open_stream(*image.shape[:2])
        # One matrix (BT.601) for the conversion and for the tag that players read, or reds shift.
        picture = av.VideoFrame.from_ndarray(image, format="rgb24").reformat(
            format="yuv420p", dst_colorspace=Colorspace.ITU601
        )
        picture.pts = self.frames
        picture.time_base = 1 / self._fps
        self._container.mux(self._stream.encode(picture))
        self.frames += 1

    def _open_stream(self, height: int, width: int) -> av.VideoStream:
        x264 = {"preset": "veryfast", "crf": "20"} if self._codec == "libx264" else {}
        stream = self._container.add_stream(self._codec, rate=self._fps, options=x264)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.time_base = 1 / self._fps
        stream.codec_context.colorspace = 6  # SMPTE 170M: the BT.601 matrix
        stream.codec_context.color_range = 1  # limited range, 16..235
        # Videos are made beside training; the encoder must not take the cores of the simulators.
        stream.codec_context.thread_count = 1
        if self._codec == "mpeg4":
            stream.bit_rate = 16 * height * width
        return stream


class EpisodeVideo(Mp4):
    """Episodes one after the other; the frames of all have one size. Arguments as :class:`Mp4`."""

    def __init__(self, path: str | os.PathLike[str], fps: float) -> None:
        super().__init__(path, fps)
        self._shape: tuple[int, ...] | None = None
        self._last: tuple[NDArray[np.uint8], str] | None = None

    def add(self, frame: NDArray[np.uint8], instruction: str = "", note: str = "") -> None:
        """Write one frame with the instruction, and a note on a line of its own, below it.

        Args:
            frame: uint8 RGB ``[h, w, 3]``.
            instruction: what the robot was told.
            note: what is expected of the state, such as ``"value 0.63"``.

        Raises:
            TypeError: not uint8.
            ValueError: not ``[h, w, 3]``, another size than before, or text that cannot fit.
            RuntimeError: the video is closed.
        """
        self._shape = _check_frame(frame, self._shape, self.frames)
        self._encode(caption(frame, [instruction, note], WHITE))
        self._last = (frame.copy(), instruction)

    def finish(self, outcome: Outcome) -> None:
        """End the episode: hold its last frame with the outcome for :data:`HOLD_SECONDS`.

        Raises:
            ValueError: an unknown outcome, or no frame since the last episode ended.
            RuntimeError: the video is closed.
        """
        _check_outcome(outcome)
        if self._last is None:
            raise ValueError("no frame in this episode yet; add() frames before finish()")
        frame, instruction = self._last
        held = caption(frame, [instruction, outcome], OUTCOME_COLOURS[outcome])
        for _ in range(self.held_frames):
            self._encode(held)
        self._last = None


class GridVideo(Mp4):
    """Episodes side by side, each in a tile of its own; only what the tiles show is in memory.

    A tile keeps its last frame, so an episode that is over stays visible with its outcome.

    Args:
        path: as in :class:`Mp4`.
        fps: as in :class:`Mp4`.
        tiles: number of episodes, at least 1; they fill rows of ``ceil(sqrt(tiles))``.

    Raises:
        ValueError: as :class:`Mp4`, or no tile.
        RuntimeError: as :class:`Mp4`.
    """

    def __init__(self, path: str | os.PathLike[str], fps: float, tiles: int) -> None:
        if tiles < 1:
            raise ValueError(f"tiles={tiles}: a grid needs at least one")
        super().__init__(path, fps)
        self._columns = math.ceil(math.sqrt(tiles))
        self._shape: tuple[int, ...] | None = None
        self._shown: list[tuple[NDArray[np.uint8], str] | None] = [None] * tiles
        self._canvas: NDArray[np.uint8] | None = None

    def show(
        self, tile: int, frame: NDArray[np.uint8], instruction: str = "", note: str = ""
    ) -> None:
        """Put a frame into a tile; :meth:`write` makes it part of the video.

        Arguments and errors as :meth:`EpisodeVideo.add`; frames of all tiles have one size.
        """
        self._shape = _check_frame(frame, self._shape, self.frames)
        self._shown[tile] = (frame.copy(), instruction)
        self._paint(tile, caption(frame, [instruction, note], WHITE))

    def finish(self, tile: int, outcome: Outcome) -> None:
        """Write the outcome under a tile's last frame.

        Raises:
            ValueError: an unknown outcome, or the tile never showed a frame.
        """
        _check_outcome(outcome)
        shown = self._shown[tile]
        if shown is None:
            raise ValueError(f"tile {tile} shows no frame yet; show() one before finish()")
        frame, instruction = shown
        self._paint(tile, caption(frame, [instruction, outcome], OUTCOME_COLOURS[outcome]))

    def write(self, times: int = 1) -> None:
        """Append the tiles as they are, ``times`` times.

        Raises:
            ValueError: no tile ever showed a frame.
            RuntimeError: the video is closed.
        """
        if self._canvas is None:
            raise ValueError("no tile shows a frame yet; show() one before write()")
        for _ in range(times):
            self._encode(self._canvas)

    def _paint(self, tile: int, picture: NDArray[np.uint8]) -> None:
        height, width = picture.shape[:2]
        if self._canvas is None:
            rows = math.ceil(len(self._shown) / self._columns)
            self._canvas = np.empty((rows * height, self._columns * width, 3), np.uint8)
            self._canvas[:] = BAND
        top, left = tile // self._columns * height, tile % self._columns * width
        self._canvas[top : top + height, left : left + width] = picture


def caption(
    frame: NDArray[np.uint8], lines: Sequence[str], colour: Colour = WHITE
) -> NDArray[np.uint8]:
    """Put a band with text below a frame; the frame's own pixels stay as they are.

    Frames narrower than :data:`MIN_WIDTH` are first enlarged by the smallest whole factor (each
    pixel becomes a square). The band's height depends on the frame's size only, so every frame of
    a video gets the same. Long lines wrap, and the font shrinks until all of it fits.

    Args:
        frame: uint8 RGB ``[h, w, 3]``.
        lines: text; empty ones are left out. The last of several stands in ``colour``.
        colour: RGB, each 0..255. A single line is drawn in it too.

    Returns:
        uint8 RGB ``[h', w', 3]`` with even ``h'`` and ``w'``, as video encoders need.

    Raises:
        TypeError: ``frame`` is not uint8.
        ValueError: ``frame`` is not ``[h, w, 3]``, or the text does not fit in the smallest font.
    """
    _check_frame(frame)
    factor = -(-MIN_WIDTH // frame.shape[1])
    picture = frame.repeat(factor, axis=0).repeat(factor, axis=1)
    height, width = picture.shape[:2]
    size = max(13, width // 20)
    band = 4 * size + height % 2
    out = np.empty((height + band, width + width % 2, 3), np.uint8)
    out[:] = BAND
    out[:height, :width] = picture
    texts = [line for line in lines if line]
    if not texts:
        return out
    font, rows = _fit(texts, size, width - size, band - size // 2)
    canvas = Image.fromarray(out[height:])
    draw = ImageDraw.Draw(canvas)
    y = size // 4
    for text, row_of in rows:
        draw.text(
            (size // 2, y), text, font=font, fill=colour if row_of == len(texts) - 1 else WHITE
        )
        y += _line_height(font)
    out[height:] = np.asarray(canvas)
    return out


def _fit(
    texts: Sequence[str], size: int, width: int, height: int
) -> tuple[ImageFont.FreeTypeFont, list[tuple[str, int]]]:
    """The largest font in which the wrapped texts fit, and (row, index of its text) pairs."""
    for points in range(size, _MIN_FONT - 1, -1):
        font = ImageFont.load_default(points)
        rows = [(row, i) for i, text in enumerate(texts) for row in _wrap(text, font, width)]
        fits = all(font.getlength(row) <= width for row, _ in rows)
        if fits and len(rows) * _line_height(font) <= height:
            return font, rows
    raise ValueError(
        f"a caption of {sum(map(len, texts))} characters does not fit {width}x{height} pixels even "
        f"at {_MIN_FONT} points: {' / '.join(texts)[:60]!r}...; shorten it or use larger frames"
    )


def _wrap(text: str, font: ImageFont.FreeTypeFont, width: int) -> list[str]:
    rows: list[str] = []
    for word in text.split():
        joined = f"{rows[-1]} {word}" if rows else word
        if rows and font.getlength(joined) <= width:
            rows[-1] = joined
        else:
            rows.append(word)
    return rows


def _line_height(font: ImageFont.FreeTypeFont) -> int:
    ascent, descent = font.getmetrics()
    return ascent + descent


def _check_outcome(outcome: str) -> None:
    if outcome not in OUTCOME_COLOURS:
        raise ValueError(f"outcome {outcome!r} is none of {tuple(OUTCOME_COLOURS)}")


def _check_frame(
    frame: NDArray[np.uint8], shape: tuple[int, ...] | None = None, number: int = 0
) -> tuple[int, ...]:
    """Return the shape of a video's frame ``number``; it must be ``shape`` if one is given."""
    if frame.dtype != np.uint8:
        raise TypeError(f"frame has dtype {frame.dtype}, not uint8 (RGB, 0..255)")
    if frame.ndim != 3 or frame.shape[2] != 3 or 0 in frame.shape:
        raise ValueError(
            f"frame has shape {frame.shape}, expected [h, w, 3]; move the channels last with "
            "image.permute(1, 2, 0) if they come first"
        )
    if shape not in (None, frame.shape):
        raise ValueError(
            f"frame {number} has shape {frame.shape}, but this video began with {shape}; one video "
            "holds one size, open another"
        )
    return frame.shape


def _pick_codec() -> str:
    for codec in CODECS:
        try:
            av.Codec(codec, "w")
        except ValueError:  # PyAV's UnknownCodecError is one
            continue
        if codec != CODECS[0]:
            warnings.warn(
                f"this PyAV has no {CODECS[0]} encoder; writing {codec}, which browsers do not "
                "play. Install the PyAV wheel from PyPI (pip install av) for H.264",
                stacklevel=3,
            )
        return codec
    raise RuntimeError(f"this PyAV has none of the encoders {CODECS}; pip install av brings them")
