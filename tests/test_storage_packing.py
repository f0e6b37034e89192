"""Packed pictures: the same rows as without, for as many of them as fit."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from faults.storage_rows import LAYOUT, PACKED, Stream, assert_whole, length, pairs_of, rows

from torchrl_vla import schema
from torchrl_vla.storage import packing
from torchrl_vla.storage.finder import RowGoneError
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.lane import ALLOCATED, EVICTED
from torchrl_vla.storage.layout import Sizes

FEW = pytest.mark.filterwarnings("ignore:lane 0 of the replay has room")


def make(tmp_path, capacity=40, layout=PACKED, **settings):
    return JournalStorage(tmp_path / "replay", capacity, layout, **settings)


def append_each(storage, episodes, decisions=None):
    for episode in episodes:
        storage.append(rows([(episode, d) for d in range(decisions or length(episode))]))


def reopen(storage, **settings):
    storage.release()
    spare = storage.sizes.slots - storage.sizes.rows
    return JournalStorage(
        storage.folder, storage.capacity, storage.layout, spare=spare, existing="reuse", **settings
    )


@FEW
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("spare", [64, 4])
@pytest.mark.parametrize("share", [0.75, 0.2, 0.01])
def test_what_is_found_is_the_end_of_what_was_written(tmp_path, seed, spare, share):
    storage = make(tmp_path, spare=spare, layout=replace(LAYOUT, compress_to=share))
    stream, written = Stream(seed, missing=0.2), []
    for turn in range(25):
        batch = stream.batch()
        index = storage.append(rows(batch))
        written += batch
        found = storage[:]
        assert_whole(found)
        assert pairs_of(found) == written[len(written) - len(found) :]
        assert_whole(storage[index[-1:]])
        if share == 0.75 and spare == 64:
            assert len(found) == min(40, len(written))
        if turn % 8 == 7:
            storage = reopen(storage)
            assert pairs_of(storage[:]) == pairs_of(found)
            assert_whole(storage[:])
    assert len(found) >= (5 if share == 0.2 else 1)


def test_pictures_take_fewer_bytes_and_are_stored_once(tmp_path):
    storage, plain = make(tmp_path, 400), make(tmp_path / "plain", 400, LAYOUT)
    stream, written = Stream(0), []
    for _ in range(20):
        written += stream.batch(5)
        for one in (storage, plain):
            one.append(rows(written[-15:]))
    files = {path.name: path.stat().st_size for path in storage.folder.glob("*.bin")}
    slots = storage.sizes.slots
    # 464 slots of 192 bytes, of which 3/4; an image more of two words per slot to find it
    assert slots == 464
    assert files["pack.bin"] == 348 * 192
    assert files["pack_start.bin"] == files["pack_length.bin"] == 464 * 8
    assert "observation.image.bin" not in files
    assert sum(files.values()) == storage.sizes.nbytes(PACKED)
    assert int(storage.rings.header[0, ALLOCATED]) == int(plain.rings.header[0, ALLOCATED])
    lengths = storage.rings.packs.lengths[storage.live().numpy()]
    episodes = storage[:][schema.EPISODE_ID].flatten().numpy()
    assert (lengths[episodes % 3 == 0] == 192).all()  # no two numbers alike: as they are
    assert lengths[episodes % 3 != 0].max() < 96


def test_rows_that_do_not_fit_leave_early_and_that_is_said(tmp_path):
    storage = make(tmp_path, capacity=100, layout=replace(LAYOUT, compress_to=0.3))
    with pytest.warns(UserWarning, match=r"room for \d+ of 100 rows: .* raise it") as said:
        append_each(storage, range(0, 120, 3))  # nothing but pictures that cannot be packed
    assert len(said) == 1
    # 164 slots of 192 bytes, of which 0.3: 50 pictures; 3 episodes of 8 rows need 27 with ends
    assert 30 <= len(storage) <= 49
    assert_whole(storage[:])
    assert int(storage.rings.header[0, EVICTED]) > 0


def test_pictures_that_fit_warn_of_nothing(tmp_path):
    storage = make(tmp_path, capacity=60, layout=replace(LAYOUT, compress_to=0.4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        append_each(storage, [episode for episode in range(200) if episode % 3])
    assert len(storage) == 60
    assert_whole(storage[:])


def test_an_interrupted_simulator_goes_on_after_its_picture_has_gone(tmp_path):
    # Episode 17 (3 decisions) pauses until the bytes of its waiting observation are written over,
    # while its slot is still there: 300 slots and a margin of 100, but 30 pictures.
    storage = make(tmp_path, 100, replace(LAYOUT, compress_to=0.1), spare=200)
    storage.append(rows([(17, 0)]))
    with pytest.warns(UserWarning, match="has room for"):
        append_each(storage, range(3, 48, 3), decisions=1)
    allocated = int(storage.rings.header[0, ALLOCATED])
    assert allocated < 100
    storage.append(rows([(17, 1), (17, 2)]))
    assert int(storage.rings.header[0, ALLOCATED]) == allocated + 3  # it brought its own
    assert pairs_of(storage[:])[-2:] == [(17, 1), (17, 2)]
    assert_whole(storage[:])


def test_a_cursor_goes_on_with_the_same_places(tmp_path):
    storage, stream = make(tmp_path, capacity=40, spare=64), Stream(1)
    for _ in range(12):
        storage.append(rows(stream.batch(2)))
    cursor, then = storage.cursor(), pairs_of(storage[:])
    later = stream.batch(3)
    storage.append(rows(later))
    where = storage.rings.packs.starts[storage.live().numpy()]
    again = reopen(storage, cursor=cursor)
    assert again.lost_rows == 0
    assert pairs_of(again[:]) == then
    assert_whole(again[:])
    again.append(rows(later))
    assert np.array_equal(again.rings.packs.starts[again.live().numpy()], where)
    assert_whole(again[:])


@FEW
def test_rows_whose_pictures_are_gone_since_the_cursor_are_counted(tmp_path):
    storage = make(tmp_path, 40, replace(LAYOUT, compress_to=0.2))
    stream = Stream(2)
    for _ in range(8):
        storage.append(rows(stream.batch(2)))
    cursor, then = storage.cursor(), pairs_of(storage[:])
    storage.append(rows(stream.batch(2)))
    with pytest.warns(UserWarning, match="of the cursor's rows are no longer there"):
        again = reopen(storage, cursor=cursor)
    assert 0 < again.lost_rows < len(then)
    assert pairs_of(again[:]) == then[again.lost_rows :]
    assert_whole(again[:])
    for _ in range(10):
        again.append(rows(stream.batch(2)))
        assert_whole(again[:])


def test_another_share_is_another_layout(tmp_path):
    make(tmp_path)
    for other in (LAYOUT, replace(LAYOUT, compress_to=0.5)):
        with pytest.raises(ValueError, match=r"differs: \['\(compress_to\)'\]"):
            make(tmp_path, layout=other, existing="reuse")
    for share in (0.0, 1.1, -1.0):
        with pytest.raises(ValueError, match=f"compress_to is {share}; it must be above 0 and at"):
            replace(LAYOUT, compress_to=share)
    states = replace(LAYOUT, observations=LAYOUT.observations[1:])
    with pytest.raises(ValueError, match=r"and no observation of \['float32\[3\]'\] is uint8"):
        replace(states, compress_to=0.5)
    assert Sizes.of(40, 1).nbytes(PACKED) < Sizes.of(40, 1).nbytes(LAYOUT)


class TestDamage:
    def fill(self, tmp_path):
        storage = make(tmp_path, capacity=60)
        pairs = [(e, d) for e in range(1, 13) for d in range(length(e))][:50]
        storage.append(rows(pairs))
        return storage, pairs

    @pytest.mark.parametrize("what", ["byte", "start", "length"])
    def test_a_broken_picture_is_named_and_given_up(self, tmp_path, what):
        storage, pairs = self.fill(tmp_path)
        packs, live = storage.rings.packs, storage.live()
        place = int(live[10])
        if what == "byte":
            packs.part(place)[5] ^= 1
        elif what == "start":
            packs.starts[place] = -7
        else:
            packs.lengths[place] = 2**40
        with pytest.raises(RuntimeError, match=f"place {place}; open the replay with verify=True"):
            storage[live]
        assert_whole(storage[live[11:]])
        with pytest.warns(UserWarning, match=r"1[01] rows were given up because of damage"):
            again = reopen(storage, verify=True)
        assert pairs_of(again[:]) == pairs[again.lost_rows :]
        assert_whole(again[:])
        again.append(rows([(20, 0)]))
        assert_whole(again[:])

    def test_what_was_given_up_never_hides_what_is_written_over(self, tmp_path):
        # Rows 10 and 40 are broken; the run between them stays. What the others say of their bytes
        # may be anything, and must neither keep later pictures nor make room of them.
        storage, pairs = self.fill(tmp_path)
        places = storage.live().numpy()
        storage.rings.packs.starts[places[[10, 40]]] = (2**50, 2**51)
        with pytest.warns(UserWarning, match="rows were given up because of damage"):
            again = reopen(storage, verify=True)
        kept = pairs_of(again[:])
        # a place's picture is also the next one of the row before, unless an episode starts there
        assert kept[0] == pairs[11]
        assert kept[-1] in (pairs[38], pairs[39])
        assert again.lost_rows == 50 - len(kept)
        stream = Stream(5, first_episode=300)
        for _ in range(12):  # several times round the ring
            again.append(rows(stream.batch(3)))
            assert_whole(again[:])

    def test_a_writer_that_was_faster_is_no_damage(self, tmp_path, monkeypatch):
        storage, _ = self.fill(tmp_path)
        live, read = storage.live()[:4], packing.Packs.read

        def overtaken(packs, places, outs):
            append_each(storage, range(30, 60))
            packs.bytes[:] = 255  # what is there now means nothing to whoever wanted the old rows
            return read(packs, places, outs)

        monkeypatch.setattr(packing.Packs, "read", overtaken)
        with pytest.raises(RowGoneError, match="overwritten while they were read"):
            storage[live]


def test_many_readers_of_a_picture_unpack_it_once(tmp_path, monkeypatch):
    storage = make(tmp_path)
    storage.append(rows([(17, 0), (17, 1), (17, 2)]))
    unpacked, unpack = [], packing.Packs.unpack

    def counted(packs, place):
        unpacked.append(place)
        return unpack(packs, place)

    monkeypatch.setattr(packing.Packs, "unpack", counted)
    found = storage[storage.live()[torch.tensor([2, 0, 1, 0])]]
    assert pairs_of(found) == [(17, 2), (17, 0), (17, 1), (17, 0)]
    assert_whole(found)
    assert len(unpacked) == len(set(unpacked)) == 4  # three, and the end
