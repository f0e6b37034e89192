"""A journal against a naive list: what is found, its ``next``, after wraps, ends and re-opening."""

import multiprocessing
import threading
import time

import pytest
import torch
from faults.storage_rows import LAYOUT, Stream, assert_whole, length, pairs_of, rows

from torchrl_vla import schema
from torchrl_vla.storage import locks
from torchrl_vla.storage.finder import RowGoneError
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.lane import ALLOCATED, COMMITTED


def make(tmp_path, capacity=40, **settings):
    return JournalStorage(tmp_path / "replay", capacity, LAYOUT, **settings)


def reopen(storage, **settings):
    storage.release()
    return JournalStorage(
        storage.folder,
        storage.capacity,
        LAYOUT,
        lanes=storage.sizes.lanes,
        spare=storage.sizes.slots - storage.sizes.rows,
        existing="reuse",
        **settings,
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("spare", [64, 12, 4])
@pytest.mark.parametrize("missing", [0.0, 0.3])
def test_what_is_found_is_the_end_of_what_was_written(tmp_path, seed, spare, missing):
    storage = make(tmp_path, spare=spare)
    stream, written = Stream(seed, missing=missing), []
    for _ in range(25):
        batch = stream.batch()
        index = storage.append(rows(batch))
        written += batch
        assert len(index) == len(batch)
        found = storage[:]
        assert_whole(found)
        assert pairs_of(found) == written[len(written) - len(found) :]
        assert len(found) == len(storage) <= 40
        # 40 rows in episodes of 5 on average end 8 times; 64 spare slots hold that and the margin
        if spare == 64:
            assert len(found) == min(40, len(written))
    assert storage.write_count == len(written)
    again = reopen(storage)
    assert pairs_of(again[:]) == pairs_of(found)
    assert_whole(again[:])


def test_every_observation_is_stored_once(tmp_path):
    storage = make(tmp_path, capacity=400)
    stream, written = Stream(0), []
    for _ in range(20):
        written += stream.batch(5)
        storage.append(rows(written[-15:]))
    # A row needs its next observation; only an episode's first row needs its own as well.
    starts = sum(decision == 0 for _, decision in written)
    assert len(written) == 300
    assert int(storage.rings.header[0, ALLOCATED]) == 300 + starts


def test_an_interrupted_simulator_goes_on_later(tmp_path):
    # Episode 8 (3 decisions: 1 + 56 % 9) pauses until its waiting observation has been overwritten.
    storage = make(tmp_path, capacity=8, spare=4)
    storage.append(rows([(8, 0)]))
    other = [(e, d) for e in range(20, 30) for d in range(length(e))]
    for pair in other:
        storage.append(rows([pair]))
    storage.append(rows([(8, 1), (8, 2)]))
    found = storage[:]
    assert_whole(found)
    assert pairs_of(found)[-2:] == [(8, 1), (8, 2)]
    assert len(found) > 4


def test_a_row_that_does_not_continue_keeps_its_own_next(tmp_path):
    # The same episode and the following decision, but another observation than announced.
    storage = make(tmp_path)
    first, second = rows([(5, 0)]), rows([(5, 1)])
    first["next", *schema.IMAGE].add_(1)
    storage.append(torch.cat([first, second]))
    found = storage[:]
    assert torch.equal(found["next", *schema.IMAGE][0], first["next", *schema.IMAGE][0])
    assert torch.equal(found[schema.IMAGE][1], second[schema.IMAGE][0])
    assert not storage.following(storage.live())[1].any()


def test_lanes_of_several_writers(tmp_path):
    storage = make(tmp_path, capacity=60, lanes=3, spare=32)
    writers = [JournalStorage.attached(storage.folder, LAYOUT) for _ in range(3)]
    streams = [Stream(lane, first_episode=10**6 * lane) for lane in range(3)]
    written = [[] for _ in writers]
    for turn in range(40):
        lane = turn * turn % 3  # uneven: lane 2 never writes
        batch = streams[lane].batch()
        writers[lane].append(rows(batch))
        written[lane] += batch
    found = storage[:]
    assert_whole(found)
    assert pairs_of(found) == written[0][-20:] + written[1][-20:]
    assert storage.positions() == [len(w) for w in written]
    writers[2].append(rows([(1, 0)]))
    with pytest.raises(RuntimeError, match=r"all 3 lanes .* have a living writer"):
        JournalStorage.attached(storage.folder, LAYOUT).append(rows([(1, 0)]))


def test_a_writer_can_have_a_lane_of_its_own(tmp_path):
    storage = make(tmp_path, lanes=3)
    second, first = (JournalStorage.attached(storage.folder, LAYOUT, lane) for lane in (2, 1))
    second.append(rows([(17, 0), (17, 1)]))
    first.append(rows([(8, 0)]))
    assert storage.positions() == [0, 1, 2]
    assert pairs_of(storage[:]) == [(8, 0), (17, 0), (17, 1)]
    with pytest.raises(RuntimeError, match=r"lane 2 of .* is written by process \d+, which is al"):
        JournalStorage.attached(storage.folder, LAYOUT, 2).append(rows([(9, 0)]))
    second.release()
    JournalStorage.attached(storage.folder, LAYOUT, 2).append(rows([(17, 2)]))
    assert storage.positions() == [0, 1, 3]


def test_new_rows_come_once_and_in_order(tmp_path):
    storage = make(tmp_path, capacity=200)
    stream, written, seen, changes = Stream(3), [], [], None
    for turn in range(12):
        batch = stream.batch()
        storage.append(rows(batch))
        written += batch
        if turn % 3 == 2:
            changes = storage.changes(changes)
            assert len(changes.gone) == 0
            seen += pairs_of(storage[changes.new])
    assert seen == written
    assert len(storage.changes(changes).new) == 0


@pytest.mark.parametrize("every", [1, 3, 20])
def test_changes_add_up_to_what_is_there(tmp_path, every):
    # 20: more than a whole lap of the ring (40 + 12 places) between two looks
    storage = make(tmp_path, lanes=2, capacity=80, spare=12)
    writer, stream, there, changes = None, Stream(4), set(), None
    for turn in range(100):
        if turn % 33 == 0:  # now and then the other lane
            writer, other = JournalStorage.attached(storage.folder, LAYOUT), writer
        writer.append(rows(stream.batch()))
        if turn % every == 0:
            changes = storage.changes(changes)
            there -= set(changes.gone.tolist())
            there |= set(changes.new.tolist())
            assert sorted(there) == sorted(storage.live().tolist())
    for one in (writer, other):
        one.release()
    cursor = storage.cursor()
    cursor["lanes"][0]["committed"] -= 5
    storage.load_state_dict(cursor)
    changes = storage.changes(changes)
    there = (there - set(changes.gone.tolist())) | set(changes.new.tolist())
    assert sorted(there) == sorted(storage.live().tolist())


def test_draws_are_uniform_over_uneven_lanes(tmp_path):
    storage = make(tmp_path, capacity=40, lanes=2, spare=16)
    writers = [JournalStorage.attached(storage.folder, LAYOUT) for _ in range(2)]
    writers[0].append(rows([(17, d) for d in range(3)]))  # 1 + 119 % 9 = 3 decisions
    writers[1].append(rows([(8, d) for d in range(1)]))
    index = storage.draw(40_000, torch.Generator().manual_seed(0))
    counts = torch.stack([(index == i).sum() for i in storage.live()])
    # 10,000 expected of each of 4 rows, standard deviation sqrt(40000 * 1/4 * 3/4) = 87
    assert counts.sum() == 40_000
    assert (counts - 10_000).abs().max() < 5 * 87


def test_columns_do_without_images(tmp_path):
    storage = make(tmp_path)
    storage.append(rows([(8, 0), (8, 1), (8, 2)]))
    small = storage.columns(storage.live(), [schema.REWARD, schema.DONE, schema.TASK_ID])
    assert small[schema.REWARD].flatten().tolist() == [1.0, 2.0, 3.0]
    assert small[schema.DONE].flatten().tolist() == [False, False, True]
    assert small[schema.TASK_ID].flatten().tolist() == [2, 2, 2]
    assert set(small.keys(True, True)) == {schema.REWARD, schema.DONE, schema.TASK_ID}


def test_places_without_a_row_are_named(tmp_path):
    storage = make(tmp_path)
    with pytest.raises(RuntimeError, match="is empty"):
        storage.draw(1)
    assert storage[:].shape == storage[[]].shape == (0,)
    assert storage.append(rows([(0, 0)])[:0]).shape == (0,)
    index = storage.append(rows([(0, 0)]))  # one decision: its next observation has a place too
    assert storage.contains(int(index[0]))
    assert not storage.contains(int(index[0]) + 1)
    for wrong in (int(index[0]) + 1, -1, storage.max_size):
        with pytest.raises(RowGoneError):
            storage[wrong]


def test_a_call_that_fails_half_way_leaves_nothing(tmp_path):
    storage = make(tmp_path)
    storage.append(rows([(17, 0)]))
    broken = rows([(17, 1), (17, 2)])
    broken["vla_action"] = broken["vla_action"].to("meta")  # no data: fails after the pictures
    with pytest.raises((RuntimeError, NotImplementedError)):
        storage.append(broken)
    assert pairs_of(storage[:]) == [(17, 0)]
    for pair in ((17, 1), (17, 2), (8, 0)):
        storage.append(rows([pair]))
    assert pairs_of(storage[:]) == [(17, 0), (17, 1), (17, 2), (8, 0)]
    assert_whole(storage[:])


def test_results_are_not_overwritten_while_somebody_holds_them(tmp_path):
    storage = make(tmp_path)
    storage.append(rows([(8, 0), (8, 1), (8, 2)]))
    live = storage.live()
    held = storage[live]["next"]["observation", "image"][1:]  # a view of a result
    copy = held.clone()
    addresses = set()
    for _ in range(6):
        again = storage[live.flip(0)]
        addresses.add(again[schema.IMAGE].data_ptr())
    assert torch.equal(held, copy)
    assert len(addresses) == 2  # the one that `again` holds while the next is made, and that one


class TestCursor:
    def test_rows_after_it_are_dropped(self, tmp_path):
        storage = make(tmp_path, capacity=40, spare=64)
        stream, written = Stream(1), []
        for _ in range(12):
            written += stream.batch(2)
            storage.append(rows(written[-6:]))
        cursor, then = storage.cursor(sync=True), pairs_of(storage[:])
        later = stream.batch(5)
        storage.append(rows(later))
        again = reopen(storage, cursor=cursor)
        assert pairs_of(again[:]) == then == written[-40:]
        assert_whole(again[:])
        assert again.lost_rows == 0
        # the run goes on as it did the first time
        again.append(rows(later))
        assert pairs_of(again[:]) == (written + later)[-40:]
        assert_whole(again[:])

    def test_rows_that_were_overwritten_since_are_counted(self, tmp_path):
        storage = make(tmp_path, capacity=20, spare=8)
        stream = Stream(1)
        for _ in range(8):
            storage.append(rows(stream.batch(2)))
        cursor, then = storage.cursor(), pairs_of(storage[:])
        storage.append(rows(stream.batch(2)))
        with pytest.warns(UserWarning, match=r"0 rows .* damage and \d+ of the cursor's rows"):
            again = reopen(storage, cursor=cursor)
        assert 0 < again.lost_rows < len(then)
        assert pairs_of(again[:]) == then[again.lost_rows :]
        assert_whole(again[:])

    def test_a_cursor_of_another_replay_is_refused(self, tmp_path):
        storage, other = make(tmp_path / "a"), make(tmp_path / "b")
        with pytest.raises(ValueError, match=f"of replay {other.id}, and .* holds replay"):
            reopen(storage, cursor=other.cursor())

    @pytest.mark.parametrize("seed", range(3))
    def test_it_can_be_of_an_earlier_look(self, tmp_path, seed):
        # a checkpoint has the rows that were counted, not those that came meanwhile
        storage, stream, counted = make(tmp_path, capacity=60), Stream(seed), []
        for _ in range(6):
            counted += (batch := stream.batch(2))
            storage.append(rows(batch))
        seen, now = storage.changes(None), storage.cursor()
        assert storage.cursor(seen) == now
        storage.append(rows(stream.batch(4)))
        then = storage.cursor(seen)
        assert then == now
        again = reopen(storage, cursor=then)
        assert again.lost_rows == 0
        assert pairs_of(again[:]) == counted[-len(again) :]
        assert_whole(again[:])

    def test_a_look_that_a_whole_ring_has_passed_gives_no_cursor(self, tmp_path):
        storage, stream = make(tmp_path), Stream(0)
        storage.append(rows(stream.batch(2)))
        seen = storage.changes(None)
        for _ in range(40):
            storage.append(rows(stream.batch(4)))
        with pytest.raises(LookupError, match="row 6 of lane 0 is overwritten"):
            storage.cursor(seen)

    def test_rows_that_never_reached_the_disk_are_counted(self, tmp_path):
        storage = make(tmp_path)
        storage.append(rows([(8, 0), (8, 1), (8, 2)]))
        cursor = storage.cursor()
        cursor["lanes"][0]["committed"] += 5  # the header on the disk is older than the checkpoint
        with pytest.warns(UserWarning, match=r"damage and 5 of the cursor's rows"):
            again = reopen(storage, cursor=cursor)
        assert again.lost_rows == 5
        assert pairs_of(again[:]) == [(8, 0), (8, 1), (8, 2)]

    def test_damage_after_it_does_not_matter(self, tmp_path):
        storage = make(tmp_path)
        first = [(17, 0), (17, 1), (17, 2)]
        storage.append(rows(first))
        cursor = storage.cursor()
        index = storage.append(rows([(e, 0) for e in range(20, 30)]))
        storage.rings.files["vla_action.chunk"][index[0]] += 1
        (storage.folder / "boot_id").write_text("another start of the machine")
        assert pairs_of(reopen(storage, cursor=cursor)[:]) == first

    def test_saving_is_a_few_numbers(self, tmp_path):
        storage = make(tmp_path, capacity=4000)
        storage.append(rows([(8, 0), (8, 1)]))
        storage.dumps(tmp_path / "saved")
        assert sum(path.stat().st_size for path in (tmp_path / "saved").iterdir()) < 1000
        storage.append(rows([(8, 2)]))
        storage.loads(tmp_path / "saved")
        assert pairs_of(storage[:]) == [(8, 0), (8, 1)]


class TestDamage:
    """What a machine that lost power may have left: any page may be old."""

    def fill(self, tmp_path):
        storage = make(tmp_path, capacity=60)
        pairs = [(e, d) for e in range(1, 13) for d in range(length(e))][:50]
        storage.append(rows(pairs))
        (storage.folder / "boot_id").write_text("another start of the machine")
        return storage, pairs

    @pytest.mark.parametrize("name", [schema.IMAGE, schema.STATE, schema.REWARD, schema.CHUNK])
    def test_a_flipped_bit_is_found(self, tmp_path, name):
        storage, pairs = self.fill(tmp_path)
        data = storage.rings.files[".".join(name)]
        data[storage.live()[10]].view(-1)[:1].view(torch.uint8)[:1].bitwise_xor_(1)
        # Row 10 is broken; an observation also belongs to row 9 unless row 10 starts an episode.
        with pytest.warns(UserWarning, match=r"1[01] rows were given up because of damage"):
            again = reopen(storage)
        assert pairs_of(again[:]) == pairs[again.lost_rows :]
        assert again.lost_rows == 11
        assert_whole(again[:])

    def test_the_longer_side_is_kept(self, tmp_path):
        storage, pairs = self.fill(tmp_path)
        storage.rings.files["vla_action.chunk"][storage.live()[45]] += 1
        with pytest.warns(UserWarning, match="5 rows were given up"):
            again = reopen(storage)
        assert pairs_of(again[:]) == pairs[:45]
        again.append(rows([(100, 0), (100, 1)]))
        assert pairs_of(again[:]) == [*pairs[:45], (100, 0), (100, 1)]
        assert_whole(again[:])

    def test_rows_that_were_synced_are_trusted_unless_asked(self, tmp_path):
        storage, pairs = self.fill(tmp_path)
        storage.cursor(sync=True)
        storage.rings.files["vla_action.chunk"][storage.live()[3]] += 1
        assert len(reopen(storage)) == len(pairs)
        with pytest.warns(UserWarning, match="4 rows were given up"):
            reopen(storage, verify=True)

    def test_commit_without_data_is_not_believed(self, tmp_path):
        storage, pairs = self.fill(tmp_path)
        storage.rings.header[0, COMMITTED] += 3
        with pytest.warns(UserWarning, match="3 rows were given up"):
            again = reopen(storage)
        assert pairs_of(again[:]) == pairs


def write_for_ever(storage, first_episode, go):
    torch.set_num_threads(1)
    stream = Stream(first_episode, first_episode=first_episode)
    while go.is_set():
        storage.append(rows(stream.batch()))


def test_no_reader_ever_sees_a_torn_row(tmp_path):
    # Two spawned writers go round rings of 30 rows while this process reads.
    storage = make(tmp_path, capacity=60, lanes=2, spare=8)
    context = multiprocessing.get_context("spawn")
    go = context.Event()
    go.set()
    writers = [
        context.Process(target=write_for_ever, args=(storage, 10**6 * k, go)) for k in range(2)
    ]
    for writer in writers:
        writer.start()
    try:
        read = refused = 0
        while storage.write_count < 1000 or read < 100:
            assert all(writer.is_alive() for writer in writers)
            if min(storage.positions()) < 30:
                time.sleep(0.05)
                continue
            try:
                assert_whole(storage[storage.draw(16)])
                read += 1
            except RowGoneError:
                refused += 1
    finally:
        go.clear()
        for writer in writers:
            writer.join(60)
    assert min(storage.positions()) > 0
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert_whole(storage[:])
    print(f"{read} batches read, {refused} refused, {storage.write_count} rows written")


def test_a_process_that_writes_keeps_others_from_opening(tmp_path, monkeypatch):
    storage = make(tmp_path)
    storage.append(rows([(0, 0)]))
    monkeypatch.setattr(locks, "DYING_SECONDS", 0.2)
    with pytest.raises(RuntimeError, match=r"lane 0 of .* is being written by process \d+"):
        JournalStorage(storage.folder, 40, LAYOUT, existing="reuse")


def test_a_writer_that_is_dying_is_waited_for(tmp_path):
    storage = make(tmp_path)
    storage.append(rows([(0, 0)]))
    threading.Timer(0.3, storage.release).start()
    assert len(JournalStorage(storage.folder, 40, LAYOUT, existing="reuse")) == 1
