"""The journal storage against TorchRL's storages: sampling, writing, bytes, flatness, cold disk.

All in one process on one thread, one folder on a local disk. Rows are random pictures, a robot
state, an action chunk and the usual scalars, in episodes of ``--decisions`` rows; batches are drawn
uniformly with replacement and nothing is done with them. Figures that depend on the disk rather
than on the code (``cold``) stand apart.
"""

from __future__ import annotations

import argparse
import gc
import mmap
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from torchrl_vla.storage.buffer import JournalReplayBuffer, PrioritizedRows
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.layout import Layout

BATCH, WRITE = 256, 16
PARTS = ("speed", "large", "flat", "write", "open", "cold")
PLAIN = ["LazyMemmapStorage", "LazyTensorStorage"]


@dataclass(frozen=True)
class Rows:
    """Transitions ``[M]`` of one simulator, made from a few pictures that repeat."""

    pictures: torch.Tensor
    """``[P, K, 3, h, w]`` uint8."""
    decisions: int
    """Rows per episode."""

    @classmethod
    def of(cls, cameras: int, size: int, decisions: int) -> Rows:
        pictures = torch.randint(0, 256, (37, cameras, 3, size, size), dtype=torch.uint8)
        return cls(pictures, decisions)

    def __call__(self, start: int, count: int) -> TensorDict:
        number = torch.arange(start, start + count)
        done = ((number + 1) % self.decisions == 0)[:, None]
        flags = {"done": done, "terminated": done, "truncated": torch.zeros_like(done)}
        out = {
            "observation": self.observation(number),
            "vla_action": {"chunk": torch.zeros(count, 4, 7)},
            "episode_id": (number // self.decisions)[:, None],
            "decision": (number % self.decisions)[:, None],
            "next": flags
            | {"observation": self.observation(number + 1), "reward": torch.zeros(count, 1)},
        }
        return TensorDict(out, batch_size=[count])

    def observation(self, number: torch.Tensor) -> dict[str, torch.Tensor]:
        state = number[:, None].float().expand(-1, 8)
        return {"image": self.pictures[number % len(self.pictures)], "state": state.clone()}


def fill(
    replay: TensorDictReplayBuffer, rows: Rows, count: int, start: int = 0, at_once: int = WRITE
) -> float:
    """Write ``count`` rows in small batches; returns the rows per second spent in the buffer."""
    spent = 0.0
    for at in range(start, start + count, at_once):
        data = rows(at, min(at_once, start + count - at))
        begun = time.perf_counter()
        replay.extend(data)
        spent += time.perf_counter() - begun
    return count / spent


def journal(
    folder: Path, capacity: int, rows: Rows, prioritized: bool = False, spare: int | None = None
) -> JournalReplayBuffer:
    storage = JournalStorage(folder, capacity, Layout.like(rows(0, 1)), spare=spare)
    sampler = PrioritizedRows(storage) if prioritized else None
    return JournalReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)


def plain(
    kind: str, folder: Path, capacity: int, prioritized: bool = False
) -> TensorDictReplayBuffer:
    if kind == "LazyMemmapStorage":
        storage = LazyMemmapStorage(capacity, scratch_dir=folder)
    else:
        storage = LazyTensorStorage(capacity)
    sampler = PrioritizedSampler(capacity, 0.6, 0.4) if prioritized else None
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=BATCH)


def sampling(
    replay: TensorDictReplayBuffer | SimpleNamespace, draws: int, priorities: bool = False
) -> Callable[[], Sample]:
    """Return a turn: speed by the clock and by processor time, page faults, reads from disk."""

    def measure() -> Sample:
        for _ in range(3):
            replay.sample()
        before = resource.getrusage(resource.RUSAGE_SELF)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(draws):
            batch = replay.sample()
            if priorities:
                replay.update_priority(batch["index"], torch.rand(BATCH))
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        after = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "rows/s": draws * BATCH / wall,
            "rows/cpu-s": draws * BATCH / cpu,
            "faults/batch": (after.ru_minflt - before.ru_minflt) / draws,
            "reads/batch": (after.ru_majflt - before.ru_majflt) / draws,
        }

    return measure


def resident() -> dict[str, int]:
    """Return anonymous and file-backed resident bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return {name: int(value.split()[0]) * 1024 for name, value in found.items()}


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


@contextmanager
def scratch(parent: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="replay-", dir=parent))
    try:
        yield folder
    finally:
        gc.collect()
        shutil.rmtree(folder)


def side_by_side(args: argparse.Namespace, title: str, size: int, cameras: int, count: int) -> None:
    """Sampling with ``next``, and bytes per transition, beside TorchRL's storages."""
    rows, conditions = Rows.of(cameras, size, args.decisions), machine()
    with scratch(args.folder) as folder:
        replays, before = {}, resident()
        sizes: dict[str, dict[str, float]] = {}
        spare = None if count >= 4096 else max(4, count // args.decisions + 6)
        for name in ("journal", *PLAIN):
            own = folder / name
            replays[name] = (
                journal(own, count, rows, spare=spare)
                if name == "journal"
                else plain(name, own, count)
            )
            fill(replays[name], rows, count)
            replays[name].sample()
            after = resident()
            grown = {key: (after[key] - before[key]) / count for key in ("RssAnon", "RssFile")}
            live = len(replays[name])
            sizes[name] = grown | {"disk": disk_bytes(own) / live if own.exists() else 0.0}
            before = after
        variants = {name: sampling(replay, args.draws) for name, replay in replays.items()}
        if size <= 64:
            replay = journal(folder / "per", count, rows, prioritized=True)
            fill(replay, rows, count)
            variants["journal, prioritized"] = sampling(replay, args.draws, priorities=True)
            replay = plain(PLAIN[0], folder / "plain-per", count, prioritized=True)
            fill(replay, rows, count)
            variants[f"{PLAIN[0]}, prioritized"] = sampling(replay, args.draws, priorities=True)
        samples = take_turns(variants, args.turns)
    ratios = [
        Ratio(f"against {name}, {unit}", "journal", [name], unit, 5.0, True)
        for name in PLAIN
        for unit in ("rows/s", "rows/cpu-s")
    ]
    per = f"{PLAIN[0]}, prioritized"
    ratios.append(Ratio("prioritized", "journal, prioritized", [per], "rows/s", None, True))
    report(
        title,
        samples,
        ratios,
        settings={"rows": count, "batch": BATCH, "sizes": sizes} | settings(args),
        conditions=conditions,
        out=out(args, f"{size}"),
    )
    print("  bytes per transition that can be drawn (RSS: growth while it was filled and sampled)")
    for name, found in sizes.items():
        print(
            f"  {name:42s}" + "  ".join(f"{value:12,.0f} {unit}" for unit, value in found.items())
        )
    share = sizes["journal"]["disk"] / 460_000
    if size == 224:
        print(f"  journal / 0.46 MB: {share:.3f}  bar <= 1.00: {'met' if share <= 1 else 'MISSED'}")


def bare(storage: JournalStorage) -> SimpleNamespace:
    """Return what only copies as many pictures from the same file, and does nothing else.

    Its cost grows with the file where caches and address translation end; the journal's share of it
    is what the journal itself adds.
    """
    pictures = storage.rings.files["observation.image"].flatten(1)
    both = [torch.empty(BATCH, pictures.shape[1], dtype=torch.uint8) for _ in range(2)]

    def sample() -> None:
        for out in both:
            torch.index_select(pictures, 0, torch.randint(len(pictures), (BATCH,)), out=out)

    return SimpleNamespace(sample=sample)


def finding(storage: JournalStorage) -> SimpleNamespace:
    """Return what finds rows and their ``next`` as a draw does, and reads nothing of them."""

    def sample() -> None:
        index = storage.draw(BATCH)
        storage.holds(index, torch.from_numpy(storage.rings.commit[index.numpy()]))
        storage.following(index)

    return SimpleNamespace(sample=sample)


def touch(storage: JournalStorage) -> None:
    """Look at every page of the pictures once, as a learner has after a while.

    Before that a draw pays for page faults, once per page and process, however it is made.
    """
    storage.rings.files["observation.image"].view(-1)[:: mmap.PAGESIZE].sum()


def flat(args: argparse.Namespace) -> None:
    """Cost of a draw by the number of rows; everything in the page cache."""
    rows, conditions = Rows.of(2, args.flat_size, args.decisions), machine()
    with scratch(args.folder) as folder:
        variants = {}
        for count in args.flat_rows:
            replay = journal(folder / f"{count}", count, rows)
            written = fill(replay, rows, count, at_once=512)
            first = sampling(replay, args.draws)()
            print(
                f"  {count:,} rows written at {written:,.0f} rows/s; with pages that are new to "
                f"the process: {first['rows/cpu-s']:,.0f} rows/cpu-s, "
                f"{first['faults/batch']:.0f} faults per batch",
                flush=True,
            )
            touch(replay.storage)
            variants[f"{count:,} rows"] = sampling(replay, args.draws)
            variants[f"{count:,} rows, bare copy"] = sampling(bare(replay.storage), args.draws)
            variants[f"{count:,} rows, found only"] = sampling(finding(replay.storage), args.draws)
        samples = take_turns(variants, args.turns)
    first, *larger = [f"{count:,} rows" for count in args.flat_rows]
    kinds = ("", ", bare copy", ", found only")
    report(
        f"Draws by number of rows, two cameras of {args.flat_size} px, page cache warm",
        samples,
        [
            Ratio(f"{name}{kind}", name + kind, [first + kind], "rows/cpu-s", None, True)
            for kind in kinds
            for name in larger
        ]
        + [
            Ratio(f"{name} / bare", name, [f"{name}, bare copy"], "rows/cpu-s", None, True)
            for name in (first, *larger)
        ],
        settings=settings(args),
        conditions=conditions,
        out=out(args, "flat"),
    )


def write(args: argparse.Namespace) -> None:
    """Rows per second into a new ring, and into a full one."""
    rows, conditions, count = Rows.of(2, 64, args.decisions), machine(), args.write_rows

    def measure(make: Callable[[Path], TensorDictReplayBuffer]) -> Callable[[], Sample]:
        def once() -> Sample:
            with scratch(args.folder) as folder:
                replay = make(folder / "r")
                first = fill(replay, rows, count)
                return {"first fill rows/s": first, "full rows/s": fill(replay, rows, count, count)}

        return once

    makers = {
        "journal": lambda folder: journal(folder, count, rows),
        **{name: lambda folder, n=name: plain(n, folder, count) for name in PLAIN},
    }
    samples = take_turns({name: measure(make) for name, make in makers.items()}, args.turns)
    report(
        f"Writing {WRITE} rows at a time, two cameras of 64 px (journal: with checksums)",
        samples,
        [Ratio("writing, ring full", "journal", [PLAIN[0]], "full rows/s", None, True)],
        settings=settings(args),
        conditions=conditions,
        out=out(args, "write"),
    )


def reopen(storage: JournalStorage, **settings: object) -> tuple[JournalStorage, float]:
    storage.release()
    begun = time.perf_counter()
    again = JournalStorage(
        storage.folder, storage.capacity, storage.layout, existing="reuse", **settings
    )
    return again, time.perf_counter() - begun


def opening(args: argparse.Namespace) -> None:
    """What saving and opening again cost."""
    rows, count = Rows.of(2, 64, args.decisions), args.open_rows
    with scratch(args.folder) as folder:
        replay = journal(folder / "r", count, rows)
        fill(replay, rows, count)
        begun = time.perf_counter()
        replay.storage.dumps(folder / "saved")
        saved = time.perf_counter() - begun
        size, cursor = disk_bytes(folder / "r"), replay.storage.cursor()
        print(f"\nOpening again, {count:,} rows, {size / 1e9:.2f} GB on disk")
        note = f"{disk_bytes(folder / 'saved')} bytes on disk"
        print(f"  cursor of a checkpoint                    {saved * 1e3:10.2f} ms, {note}")
        storage = replay.storage
        for name, settings_ in (
            ("after a killed process", {}),
            ("at a cursor", {"cursor": cursor}),
            ("with all checksums compared", {"verify": True}),
        ):
            storage, spent = reopen(storage, **settings_)
            assert len(storage) == count
            print(f"  {name:42s}{spent * 1e3:10.2f} ms")


def cold(args: argparse.Namespace) -> None:
    """Draws whose pages are on the disk only."""
    rows, count = Rows.of(2, 64, args.decisions), args.cold_rows
    with scratch(args.folder) as folder:
        storage = journal(folder / "r", count, rows).storage
        fill(JournalReplayBuffer(storage=storage), rows, count)
        storage.cursor(sync=True)
        kept, size = (storage.folder, storage.capacity, storage.layout), disk_bytes(folder)
        del storage
        gc.collect()
        for path in (folder / "r").glob("*.bin"):
            with path.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        replay = JournalReplayBuffer(
            storage=JournalStorage(*kept, existing="reuse"), batch_size=BATCH
        )
        begun = time.perf_counter()
        for _ in range(args.cold_draws):
            replay.sample()
        spent = time.perf_counter() - begun
        rate = args.cold_draws * BATCH / spent
        print(f"\nCold page cache, {count:,} rows, {size / 1e9:.1f} GB (a figure of this disk)")
        print(f"  first {args.cold_draws} batches                          {rate:10,.0f} rows/s")


def settings(args: argparse.Namespace) -> dict[str, object]:
    return {key: str(value) for key, value in vars(args).items()}


def out(args: argparse.Namespace, part: str) -> Path | None:
    return args.out and args.out.with_name(f"{args.out.stem}-{part}{args.out.suffix}")


def main() -> None:
    parser = command_line(__doc__.splitlines()[0], turns=5)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS[:-1])
    parser.add_argument("--folder", type=Path, default=None, help="parent of the scratch folders")
    parser.add_argument("--draws", type=int, default=40, help="batches per turn")
    parser.add_argument("--decisions", type=int, default=100, help="rows per episode")
    parser.add_argument("--rows", type=int, default=20_000, help="two cameras of 64 px")
    parser.add_argument("--large-rows", type=int, default=1_000, help="three cameras of 224 px")
    parser.add_argument("--flat-rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--flat-size", type=int, default=32, help="px, of two cameras")
    parser.add_argument("--write-rows", type=int, default=4_000)
    parser.add_argument("--open-rows", type=int, default=20_000)
    parser.add_argument("--cold-rows", type=int, default=400_000)
    parser.add_argument("--cold-draws", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "speed" in args.only:
        side_by_side(args, "Sampling with next, two cameras of 64 px", 64, 2, args.rows)
    if "large" in args.only:
        args.draws = max(1, args.draws // 8)
        side_by_side(args, "Sampling with next, three of 224 px", 224, 3, args.large_rows)
        args.draws *= 8
    for name, part in (("flat", flat), ("write", write), ("open", opening), ("cold", cold)):
        if name in args.only:
            part(args)


if __name__ == "__main__":
    main()
