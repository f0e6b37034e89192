"""A writer is killed at random moments; the replay is opened again and compared with its reports.

``STORAGE_KILLS=100 pytest tests/faults/test_storage_kill.py -s`` is the long version.
"""

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import struct
import sys
import time

import pytest
import torch
from storage_rows import LAYOUT, PACKED, Stream, assert_whole, pairs_of, rows

from torchrl_vla import schema
from torchrl_vla.storage.buffer import JournalReplayBuffer, PrioritizedRows
from torchrl_vla.storage.finder import RowGoneError
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.lane import LaneWriter
from torchrl_vla.storage.packing import PackWriter

KILLS = int(os.environ.get("STORAGE_KILLS", "10"))
CAPACITY, SPARE = 60, 40
MILLION = 10**6


def both_layouts(*slow: str) -> pytest.MarkDecorator:
    """Run a test with plain and with packed pictures; what is named runs in ``make slow`` only."""
    layouts = {"plain": LAYOUT, "packed": PACKED}
    marks = {name: pytest.mark.slow if name in slow else () for name in layouts}
    return pytest.mark.parametrize(
        "layout", [pytest.param(layouts[name], id=name, marks=marks[name]) for name in layouts]
    )


def stream_of(kill):
    return Stream(kill, first_episode=kill * MILLION, missing=0.1)


def write(folder, kill, report, layout):
    """Append for ever; after each call, say how many rows it has committed."""
    torch.set_num_threads(1)
    storage = JournalStorage.attached(folder, layout)
    stream, count = stream_of(kill), 0
    while True:
        batch = rows(stream.batch())
        count += len(batch)
        storage.append(batch)
        os.write(report, struct.pack("q", count))


def kill_while_writing(folder, kill, delay, layout):
    """Return what the writer reported before it died of SIGKILL."""
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=write, args=(folder, kill, writer, layout)
    )
    process.start()
    os.close(writer)
    first = os.read(reader, 8)  # it is at work
    time.sleep(delay)
    process.kill()
    process.join()
    assert process.exitcode == -9
    reports = first
    while part := os.read(reader, 1 << 16):
        reports += part
    os.close(reader)
    return [count for (count,) in struct.iter_unpack("q", reports[: len(reports) // 8 * 8])]


def written_by(kill, count):
    """Return the pairs of the rows a writer wrote first, and where its calls ended."""
    stream, pairs, ends = stream_of(kill), [], [0]
    while len(pairs) < count + 1:
        pairs += stream.batch()
        ends.append(len(pairs))
    return pairs, ends


@both_layouts("plain")
def test_every_committed_row_is_found_after_a_kill_and_no_other(tmp_path, layout):
    folder = tmp_path / "replay"
    storage = JournalStorage(folder, CAPACITY, layout, spare=SPARE)
    # what the parent reads at the same time must be whole as well
    watching = JournalStorage.attached(folder, layout)
    generator, known, total, in_flight = random.Random(0), [], 0, 0
    for kill in range(KILLS):
        reported = kill_while_writing(folder, kill, generator.uniform(0.0, 0.05), layout)[-1]
        try:
            assert_whole(watching[watching.draw(16)])
        except RowGoneError as error:  # a draw from before the recovery may be refused, never torn
            raise AssertionError("the writer is dead; its committed rows are there") from error
        storage = JournalStorage(folder, CAPACITY, layout, spare=SPARE, existing="reuse")
        new = storage.write_count - total
        pairs, ends = written_by(kill, max(new, reported))
        # everything reported is there, and at most one call more (it died before it could say so)
        last_call = next(end for end in ends if end > reported)
        assert reported <= new <= last_call
        in_flight += new > reported
        total, known = storage.write_count, known + pairs[:new]
        found = storage[:]
        assert_whole(found)
        assert pairs_of(found) == known[len(known) - len(found) :]
        assert len(found) >= min(len(known), CAPACITY - 10)
        episodes_end = (found[schema.DONE] & ~found[schema.TERMINATED]).sum()
        assert episodes_end == found[schema.TRUNCATED].sum()
        # this process goes on in the same lane, as a replaced worker does
        index = storage.append(rows([(8 + kill * 9, 0)]))
        known, total = [*known, (8 + kill * 9, 0)], total + 1
        assert_whole(storage[index])
        storage.release()
    print(
        f"{KILLS} kills: {total - KILLS} rows committed by the killed writers, all found; "
        f"{in_flight} times a call had been committed and not yet reported"
    )


class AtLine:
    """Calls ``act`` before line ``number`` of the next :meth:`LaneWriter.append` runs.

    Those of the packed pictures' stores count too.
    """

    CODES = (LaneWriter.append.__code__, PackWriter.write.__code__)

    def __init__(self, number, act):
        self.number, self.act, self.lines = number, act, 0

    def __enter__(self):
        sys.settrace(self.enter)
        return self

    def __exit__(self, *exception):
        sys.settrace(None)

    def enter(self, frame, event, _):
        return self.count if frame.f_code in self.CODES else None

    def count(self, frame, event, _):
        if event == "line":
            self.lines += 1
            if self.lines == self.number:
                self.act()
        return self.count


def die_at_line(folder, batches, number, layout):
    storage = JournalStorage.attached(folder, layout)
    for batch in batches[:-1]:
        storage.append(rows(batch))
    data = rows(batches[-1])
    with AtLine(number, lambda: os.kill(os.getpid(), signal.SIGKILL)):
        storage.append(data)


def interrupt():
    raise KeyboardInterrupt


@both_layouts("packed")
def test_an_interrupt_before_any_line_of_the_commit(tmp_path, layout):
    storage = JournalStorage(tmp_path / "replay", CAPACITY, layout, spare=SPARE)
    stream, written = Stream(3), []
    for number in itertools.count(1):
        batch = stream.batch(3)
        try:
            with AtLine(number, interrupt):
                storage.append(rows(batch))
            written += batch
            break
        except KeyboardInterrupt:
            if storage.write_count > len(written):
                written += batch
        assert storage.write_count == len(written)
        found = storage[:]
        assert_whole(found)
        assert pairs_of(found) == written[len(written) - len(found) :]
        written += (batch := stream.batch(3))
        storage.append(rows(batch))
        found = storage[:]
        assert_whole(found)
        assert pairs_of(found) == written[len(written) - len(found) :]
    assert number > 20
    assert len(storage) == CAPACITY


@both_layouts("plain", "packed")
def test_a_kill_before_any_line_of_the_commit(tmp_path, layout):
    """The ring is full, so the dying call overwrites; its rows are there all or not at all."""
    stream = Stream(7, missing=0.1)
    batches = [stream.batch(3) for _ in range(12)]
    before = [pair for batch in batches[:-1] for pair in batch]
    outcomes = []
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        JournalStorage(folder, CAPACITY, layout, spare=SPARE)
        process = multiprocessing.get_context("fork").Process(
            target=die_at_line, args=(folder, batches, number, layout)
        )
        process.start()
        process.join()
        if process.exitcode == 0:  # the call has fewer lines
            break
        assert process.exitcode == -signal.SIGKILL
        unrecovered = JournalStorage.attached(folder, layout)
        assert_whole(unrecovered[unrecovered.draw(64)])
        storage = JournalStorage(folder, CAPACITY, layout, spare=SPARE, existing="reuse")
        found, written = storage[:], before + batches[-1]
        assert_whole(found)
        outcomes.append(storage.write_count == len(written))
        known = written if outcomes[-1] else before
        assert storage.write_count == len(known)
        assert pairs_of(found) == known[len(known) - len(found) :]
        later = stream_of(number).batch(4) + stream_of(number).batch(4)
        storage.append(rows(later))
        assert pairs_of(storage[:])[-len(later) :] == later
        assert_whole(storage[:])
        shutil.rmtree(folder)
    assert len(outcomes) > 20
    assert outcomes == sorted(outcomes)  # first never there, then always
    assert set(outcomes) == {False, True}


def learn(folder, report):
    """Update priorities for ever and report them."""
    torch.set_num_threads(1)
    storage = JournalStorage.attached(folder, LAYOUT)
    replay = JournalReplayBuffer(storage=storage, sampler=PrioritizedRows(storage), batch_size=8)
    generator = random.Random(0)
    while True:
        batch = replay.sample()
        value = generator.uniform(0.5, 9.0)
        replay.update_priority(batch["index"], torch.full((8,), value))
        for index in set(batch["index"].tolist()):
            os.write(report, struct.pack("qd", index, value))


def test_priorities_are_there_after_a_kill(tmp_path):
    folder = tmp_path / "replay"
    storage = JournalStorage(folder, CAPACITY, LAYOUT, spare=SPARE)
    stream = Stream(0)
    for _ in range(4):
        storage.append(rows(stream.batch(3)))
    storage.release()
    reader, writer = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=learn, args=(folder, writer))
    process.start()
    os.close(writer)
    reports = b""
    while len(reports) < 16 * 60:
        reports += os.read(reader, 16)
    process.kill()
    process.join()
    while part := os.read(reader, 16):
        reports += part
    latest = dict(struct.iter_unpack("qd", reports[: len(reports) // 16 * 16]))
    storage = JournalStorage(folder, CAPACITY, LAYOUT, spare=SPARE, existing="reuse")
    kept = storage.rings.priority
    # the last batch of 8 may have been stored without having been reported whole
    differ = [i for i, value in latest.items() if abs(kept[i] - value) > 1e-5]
    assert len(differ) <= 8
    sampler = PrioritizedRows(storage, alpha=1.0)
    _, info = sampler.sample(storage, 4)
    assert set(info) == {"priority_weight"}
    index = storage.live()
    expected = torch.from_numpy(kept[index.numpy()])
    never = expected.isnan()
    tree = torch.as_tensor(sampler._sum_tree[index])
    # alpha 1, TorchRL's eps 1e-8: the tree holds the priorities themselves
    torch.testing.assert_close(tree[~never], expected[~never])
    assert (tree[never] > 0).all()
