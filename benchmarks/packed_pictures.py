"""What packed pictures cost and save in the replay: bytes, writing, drawing, reading once.

The same rows go into two journals, one with pictures as they are and one packed
(``replay.compress_to``). Pictures are the tabletop's, as its expert sees them, in episodes of their
real length, or noise, which no codec makes smaller. ``once`` reads rows in the order in which they
were written, as a learner with cached features does; ``drawn`` reads random ones, as a learner that
trains on images does. All on one thread.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from replay import BATCH, WRITE, Rows, fill
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns

from torchrl_vla.data.demonstrations import record
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.storage.buffer import JournalReplayBuffer
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.layout import Layout

SOURCES = {"tabletop 64 px": 64, "tabletop 224 px": 224, "noise 64 px": 64}


def seen(source: str, episodes: int) -> Rows:
    """Return rows of two cameras whose pictures come from ``source``."""
    size = SOURCES[source]
    if source.startswith("noise"):
        return Rows.of(2, size, 20)
    suite = TabletopSuite(image_size=size, second_camera=True)
    found = record(suite.simulators(1), range(episodes))
    pictures = [episode.image[::4] for episode in found]  # one of four control steps is decided
    return Rows(torch.cat(pictures), sum(map(len, pictures)) // len(pictures))


def filled(folder: Path, rows: Rows, count: int, share: float | None) -> JournalReplayBuffer:
    layout = replace(Layout.like(rows(0, 1)), compress_to=share)
    replay = JournalReplayBuffer(
        storage=JournalStorage(folder, count, layout, spare=max(64, count // 4)), batch_size=BATCH
    )
    fill(replay, rows, count)
    return replay


def picture_bytes(storage: JournalStorage) -> float:
    """Return the bytes that pictures take per row that can be drawn, on average."""
    live = storage.live().numpy()
    used = torch.cat([storage.live(), storage.next_places(storage.live())]).unique().numpy()
    if storage.rings.packs is not None:
        return float(storage.rings.packs.lengths[used].sum()) / len(live)
    return sum(c.nbytes for c in storage.layout.observations[:1]) * len(used) / len(live)


def measuring(replay: JournalReplayBuffer, rows: Rows, draws: int) -> Callable[[], Sample]:
    """Return a turn: rows per processor second written, drawn, and read once."""

    def spent(work: Callable[[], object]) -> float:
        begun = time.process_time()
        work()
        return time.process_time() - begun

    def measure() -> Sample:
        count = WRITE * max(1, draws * BATCH // WRITE // 4)
        fresh = [rows(start, WRITE) for start in range(0, count, WRITE)]
        written = spent(lambda: [replay.extend(data) for data in fresh])
        drawn = spent(lambda: [replay.sample() for _ in range(draws)])
        live = replay.storage.live()[: draws * BATCH]
        once = spent(lambda: [replay.storage.get(part) for part in live.split(128)])
        return {
            "written rows/s": count / written,
            "drawn rows/s": draws * BATCH / drawn,
            "once rows/s": len(live) / once,
            "picture bytes/row": picture_bytes(replay.storage),
        }

    return measure


def main() -> None:
    parser = command_line(__doc__.splitlines()[0], turns=5)
    parser.add_argument("--folder", type=Path, default=None, help="parent of the scratch folders")
    parser.add_argument("--draws", type=int, default=8, help="batches per turn")
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--episodes", type=int, default=12, help="of the tabletop's expert")
    parser.add_argument("--share", type=float, default=0.6, help="compress_to")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for source in SOURCES:
        one(args, source)


def one(args: argparse.Namespace, source: str) -> None:
    """Measure one source of pictures."""
    rows, conditions = seen(source, args.episodes), machine()
    draws = args.draws if SOURCES[source] == 64 else max(1, args.draws // 8)
    share = 1.0 if source.startswith("noise") else args.share
    with tempfile.TemporaryDirectory(prefix="replay-", dir=args.folder) as parent:
        variants = {}
        for name, compress_to in (("as they are", None), ("packed", share)):
            count = args.rows if SOURCES[source] == 64 else args.rows // 4
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # rows that leave early would be no fair figure
                replay = filled(Path(parent) / name.replace(" ", "-"), rows, count, compress_to)
            variants[name] = measuring(replay, rows, draws)
        samples = take_turns(variants, args.turns)
    units = ("written rows/s", "drawn rows/s", "once rows/s")
    report(
        f"Packed pictures, {source}, two cameras",
        samples,
        [Ratio(unit.split()[0], "packed", ["as they are"], unit, None, True) for unit in units]
        + [Ratio("bytes", "packed", ["as they are"], "picture bytes/row", None, False)],
        settings={key: str(value) for key, value in vars(args).items()},
        conditions=conditions,
        out=args.out and args.out.with_name(f"{args.out.stem}-{source.replace(' ', '-')}.json"),
    )


if __name__ == "__main__":
    main()
