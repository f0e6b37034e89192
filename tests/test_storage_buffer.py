"""TorchRL's buffer on the journal: samplers, n steps, and collectors' worker processes."""

import multiprocessing
import pickle
from collections import Counter
from multiprocessing import resource_tracker
from pathlib import Path

import numpy as np
import pytest
import torch
from envs.counter import CounterSuite, shown
from faults.storage_rows import LAYOUT, Stream, assert_whole, length, pairs_of, rows
from tensordict.nn import TensorDictModuleBase
from torch import nn
from torchrl.data.replay_buffers.samplers import prioritized

from torchrl_vla import schema
from torchrl_vla.actors import ActorSettings, start_actors
from torchrl_vla.storage.buffer import (
    STEPS,
    FreshRows,
    JournalReplayBuffer,
    PrioritizedRows,
    look_ahead,
)
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.layout import Layout, transition_layout


def make(tmp_path, capacity=60, **settings):
    return JournalStorage(tmp_path / "replay", capacity, LAYOUT, spare=40, **settings)


def fill(storage, batches, seed=0):
    stream, written = Stream(seed), []
    for _ in range(batches):
        batch = stream.batch(3)
        storage.append(rows(batch))
        written += batch
    return written


def test_as_a_torchrl_script_uses_it(tmp_path):
    replay = JournalReplayBuffer(storage=make(tmp_path), batch_size=16)
    written = Stream(0).batch(5)
    index = replay.extend(rows(written))
    assert len(replay) == replay.write_count == 15
    assert_whole(replay[index])
    assert replay.add(rows([(8, 0)])[0]).shape == ()
    for _ in range(5):
        batch = replay.sample()
        assert_whole(batch)
        assert torch.equal(replay[batch["index"]][schema.REWARD], batch[schema.REWARD])
    assert pairs_of(replay[:]) == [*written, (8, 0)]
    assert len(list(replay.storage)) == 16
    again = JournalReplayBuffer(storage=make(tmp_path / "other"), batch_size=4, prefetch=2)
    again.extend(rows(written))
    held = [again.sample() for _ in range(8)]
    for batch in held:
        assert_whole(batch)


def test_no_semaphore_has_a_name(tmp_path, monkeypatch):
    # A name stays in /dev/shm when the process and its resource tracker are killed together.
    assert multiprocessing.get_start_method() == "spawn"  # with fork they have none
    registered = []
    monkeypatch.setattr(resource_tracker, "register", lambda *what: registered.append(what))
    replay = JournalReplayBuffer(storage=make(tmp_path), batch_size=4, shared=True)
    replay.for_lane(0).extend(rows([(8, 0), (8, 1)]))
    again = pickle.loads(pickle.dumps(replay.storage))
    assert_whole(again[:])
    replay.sample()
    assert registered == []


def test_it_is_appended_to_and_nothing_else(tmp_path):
    replay = JournalReplayBuffer(storage=make(tmp_path))
    replay.extend(rows([(8, 0)]))
    for forbidden in (lambda: replay.empty(), lambda: replay.__setitem__(0, rows([(8, 0)])[0])):
        with pytest.raises(NotImplementedError, match="journal is"):
            forbidden()
    assert len(replay) == 1


def test_draws_follow_the_generator(tmp_path):
    storage = make(tmp_path)
    fill(storage, 4)
    drawn = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(3)
        replay = JournalReplayBuffer(storage=storage, batch_size=16, generator=generator)
        drawn.append(replay.sample()["index"])
    assert torch.equal(*drawn)


class TestPriorities:
    def buffer(self, storage, **settings):
        sampler = PrioritizedRows(storage, **settings)
        return JournalReplayBuffer(storage=storage, sampler=sampler, batch_size=256)

    def shares(self, replay, draws=40):
        counts = Counter()
        for _ in range(draws):
            counts.update(replay.sample()["index"].tolist())
        return counts

    def test_rows_are_drawn_by_priority_with_importance_weights(self, tmp_path):
        torch.manual_seed(0)
        storage = make(tmp_path)
        replay = self.buffer(storage, alpha=1.0, beta=1.0)
        index = replay.extend(rows([(8, 0), (8, 1), (8, 2)]))
        replay.update_priority(index, torch.tensor([1.0, 2.0, 5.0]))
        counts = self.shares(replay)
        # 10,240 draws at 1/8, 2/8, 5/8: 1280, 2560, 6400; standard deviation at most 50
        for i, expected in zip(index.tolist(), (1280, 2560, 6400), strict=True):
            assert abs(counts[i] - expected) < 250
        batch = replay.sample()
        weight = dict(zip(batch["index"].tolist(), batch["priority_weight"].tolist(), strict=True))
        # (p / smallest p) ** -1 = 1, 1/2, 1/5
        for i, expected in zip(index.tolist(), (1.0, 0.5, 0.2), strict=True):
            assert weight[i] == pytest.approx(expected, abs=1e-5)

    def test_rows_that_others_write_get_the_highest_and_leavers_are_not_drawn(self, tmp_path):
        torch.manual_seed(0)
        storage = make(tmp_path)
        replay = self.buffer(storage, alpha=1.0)
        other = JournalStorage.attached(storage.folder, LAYOUT)
        stream = Stream(5)
        for turn in range(30):
            index = other.append(rows(stream.batch(2)))
            if turn == 0:
                replay.update_priority(index, torch.full((len(index),), 3.0))
            batch = replay.sample()
            assert_whole(batch)
            assert set(batch["index"].tolist()) <= set(storage.live().tolist())
            assert storage.contains(int(index[0]))
            tree = torch.as_tensor(replay.sampler._sum_tree[index])
            assert tree.tolist() == pytest.approx([3.0] * len(index))
        # after many laps: exactly the live rows have a priority
        everywhere = torch.as_tensor(replay.sampler._sum_tree[torch.arange(storage.max_size)])
        assert sorted(everywhere.nonzero().flatten().tolist()) == sorted(storage.live().tolist())

    def test_a_learner_that_slept_through_a_whole_lap(self, tmp_path):
        storage = make(tmp_path)
        replay = self.buffer(storage, alpha=1.0)
        fill(storage, 2)
        replay.sample()
        fill(storage, 40)
        assert set(replay.sample()["index"].tolist()) <= set(storage.live().tolist())
        everywhere = torch.as_tensor(replay.sampler._sum_tree[torch.arange(storage.max_size)])
        assert sorted(everywhere.nonzero().flatten().tolist()) == sorted(storage.live().tolist())

    def test_a_row_that_is_added_brings_its_own(self, tmp_path):
        replay = self.buffer(make(tmp_path), alpha=1.0)
        row = rows([(8, 0)])[0]
        row["index"] = replay.add(row)
        row["td_error"] = torch.tensor(3.0)
        assert replay.update_tensordict_priority(row) == 1
        assert float(replay.sampler._sum_tree[int(row["index"])]) == pytest.approx(3.0)

    def test_they_are_kept_with_the_rows(self, tmp_path):
        storage = make(tmp_path)
        replay = self.buffer(storage, alpha=1.0)
        index = replay.extend(rows([(8, 0), (8, 1), (8, 2)]))
        replay.update_priority(index[:2], torch.tensor([7.0, 2.0]))
        storage.release()
        again = JournalStorage(storage.folder, 60, LAYOUT, spare=40, existing="reuse")
        sampler = PrioritizedRows(again, alpha=1.0)
        sampler.sample(again, 1)
        # the third had none yet: it gets the highest known, 7
        assert torch.as_tensor(sampler._sum_tree[index]).tolist() == pytest.approx([7.0, 2.0, 7.0])

    def test_update_by_the_sampled_batch(self, tmp_path):
        storage = make(tmp_path)
        replay = self.buffer(storage, alpha=1.0)
        fill(storage, 3)
        batch = replay.sample()
        batch["td_error"] = batch[schema.REWARD].flatten()
        replay.update_tensordict_priority(batch)
        expected = batch["td_error"]
        assert torch.equal(
            torch.from_numpy(storage.rings.priority[batch["index"].numpy()]), expected
        )

    @pytest.mark.parametrize("overwritten", [4, 2, 0])
    def test_a_priority_never_reaches_the_row_that_came_after(self, tmp_path, overwritten):
        # Field case B25. Each row is an episode, which takes two places: 4 rows fill the 4 + 4.
        storage = JournalStorage(tmp_path / "replay", 4, LAYOUT, spare=4)
        replay = self.buffer(storage, alpha=1.0)
        index = replay.extend(rows([(9 * e, 0) for e in range(4)]))
        batch = replay.sample()
        drawn = batch["index"].tolist()
        old = batch[[drawn.index(i) for i in index.tolist()]]
        old["td_error"] = torch.full((4,), 100.0)
        for e in range(10, 10 + overwritten):
            replay.extend(rows([(9 * e, 0)]))
        assert storage.live().sort().values.tolist() == index.tolist()  # in the same places
        assert replay.update_tensordict_priority(old) == 4 - overwritten
        tree = torch.as_tensor(replay.sampler._sum_tree[index])
        assert tree.tolist() == pytest.approx([1.0] * overwritten + [100.0] * (4 - overwritten))
        kept = storage.rings.priority[index.numpy()]
        assert np.isnan(kept[:overwritten]).all()
        assert (kept[overwritten:] == 100.0).all()

    def test_a_missing_extension_is_explained(self, tmp_path, monkeypatch):
        monkeypatch.setattr(prioritized, "SumSegmentTreeFp32", None)
        with pytest.raises(RuntimeError, match=r"needs TorchRL's compiled extension.*uniformly"):
            PrioritizedRows(make(tmp_path))


class TestFreshRows:
    def test_stale_rows_are_never_drawn(self, tmp_path):
        # versions are episode // 4: episodes 0..11 have versions 0, 1, 2
        storage = make(tmp_path)
        storage.append(rows([(e, d) for e in range(12) for d in range(length(e))]))
        sampler = FreshRows(max_lag=1)
        replay = JournalReplayBuffer(storage=storage, sampler=sampler, batch_size=200)
        for learner, allowed in ((1, {0, 1, 2}), (2, {1, 2}), (3, {2})):
            sampler.learner_version = learner
            assert set(replay.sample()[schema.POLICY_VERSION].flatten().tolist()) == allowed
        sampler.learner_version = 4
        with pytest.raises(RuntimeError, match=r"none of \d+ rows has .* at least 3 .*max_lag 1"):
            replay.sample()

    def test_one_fresh_row_among_many(self, tmp_path):
        storage = make(tmp_path)
        storage.append(rows([(e, d) for e in range(12) for d in range(length(e))][:50]))
        storage.append(rows([(17 * 400, 0)]))
        sampler = FreshRows(max_lag=0)
        sampler.learner_version = 1700  # 6800 // 4
        replay = JournalReplayBuffer(storage=storage, sampler=sampler, batch_size=3000)
        assert pairs_of(replay.sample()) == [(6800, 0)] * 3000

    def test_range(self):
        with pytest.raises(ValueError, match="max_lag is -1"):
            FreshRows(-1)


class TestLookAhead:
    def test_numbers_by_hand(self, tmp_path):
        # Episode 13: 1 + 91 % 9 = 2 decisions. Episode 17: 3. Rewards 1, 2, 3; 2 steps each.
        storage = make(tmp_path)
        index = storage.append(rows([(13, 0), (13, 1), (17, 0), (17, 1), (17, 2)]))
        out = look_ahead(storage, index, 2, gamma=0.5)
        # 1 + 0.5^2 * 2 = 1.5 | 2 (end) | 1.5 | 2 + 0.25 * 3 = 2.75 | 3 (end)
        assert out[schema.REWARD].flatten().tolist() == [1.5, 2.0, 1.5, 2.75, 3.0]
        assert out[STEPS].flatten().tolist() == [4, 2, 4, 4, 2]
        assert out[schema.DONE].flatten().tolist() == [True, True, False, True, True]
        # the states say (episode, decision): next of the last decision taken in
        decisions = out["next", *schema.STATE][:, 1].tolist()
        assert decisions == [2.0, 2.0, 2.0, 3.0, 3.0]
        whole = look_ahead(storage, index[2:3], 5, gamma=0.5)
        # 1 + 0.25 * 2 + 0.0625 * 3 = 1.6875
        assert whole[schema.REWARD].item() == 1.6875
        assert_whole(look_ahead(storage, index, 1, gamma=0.5).exclude(STEPS))
        with pytest.raises(ValueError, match="n is 0"):
            look_ahead(storage, index, 0, gamma=0.5)

    @pytest.mark.parametrize("n", [2, 4])
    def test_it_agrees_with_whole_episodes_in_a_row(self, tmp_path, n):
        # Written in small pieces by three simulators, around the ring; the reference sees each
        # episode in one piece.
        storage = make(tmp_path)
        written = fill(storage, 20)
        index = storage.live()
        there = written[-len(index) :]
        out = look_ahead(storage, index, n, gamma=0.9)
        decisions = dict(zip(there, index.tolist(), strict=True))
        for row, (episode, decision) in zip(out.unbind(0), there, strict=True):
            total, steps = 0.0, 0
            last = decision
            for last in range(decision, decision + n):
                if (episode, last) not in decisions:
                    last -= 1
                    break
                total += 0.9**steps * (last + 1.0)  # rewards are 1, 2, 3; each of 2 steps
                steps += 2
            assert float(row[schema.REWARD]) == pytest.approx(total)
            assert int(row[STEPS]) == steps
            assert bool(row[schema.DONE]) == (last + 1 == length(episode))
            assert float(row["next", *schema.STATE][1]) == last + 1


def test_windows_of_three_decisions_at_the_end_of_the_ring(tmp_path):
    # Field case B26: 10 rows are left of three episodes of 4 decisions (length(e) == 4 where
    # e % 9 == 3): the last 2 of the first, and 4 of each of the others.
    first, second, third = 3, 12, 21
    storage = JournalStorage(tmp_path / "replay", 10, LAYOUT, spare=5)
    storage.append(rows([(second + 9 * 10, 0), (second + 9 * 10, 1)]))  # moves the ring's end
    for pairs in ([(e, d) for d in range(4)] for e in (first, second, third)):
        storage.append(rows(pairs))
    assert pairs_of(storage[:]) == [(first, 2), (first, 3)] + [
        (e, d) for e in (second, third) for d in range(4)
    ]
    drawn = storage.draw(1000, torch.Generator().manual_seed(0))
    then, one = storage.following(drawn)
    last, two = storage.following(then)
    whole = one & two
    windows = [storage[places[whole]] for places in (drawn, then, last)]
    for part in windows:
        assert_whole(part)
    found = set(zip(*map(pairs_of, windows), strict=True))
    legal = [[(e, d), (e, d + 1), (e, d + 2)] for e in (second, third) for d in (0, 1)]
    assert found == {tuple(window) for window in legal}
    # some window begins at the end of the ring and ends at its start
    assert ((last < drawn) & whole).any()
    # a look-ahead of three decisions is one window where there is one, and shorter elsewhere
    ahead = look_ahead(storage, drawn, 3, gamma=1.0)
    assert torch.equal(ahead[STEPS].squeeze(-1) == 6, whole)


class Shake(TensorDictModuleBase):
    """Random chunks."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.zeros(1))
        self.in_keys, self.out_keys = [schema.STATE], [schema.CHUNK]

    def forward(self, td):
        return td.set(schema.CHUNK, 2 * torch.rand(*td.batch_size, 2, 2) - 1)


@pytest.mark.slow
def test_spawned_collectors_write_lanes_of_their_own(tmp_path):
    """The real actors: worker processes, chunked environments, TorchRL's collector."""
    suite = CounterSuite(lengths=(7, 3))
    layout = transition_layout(suite.meta, chunk_size=2)
    storage = JournalStorage(tmp_path / "replay", 200, layout, lanes=2)
    replay = JournalReplayBuffer(storage=storage, shared=True)
    settings = ActorSettings(num_workers=2, envs_per_worker=2, decisions_per_env=4, timeout=120.0)
    workers = start_actors(
        suite,
        Shake,
        settings,
        chunk_size=2,
        gamma=0.5,
        seed=0,
        rank=0,
        folder=tmp_path / "actors",
        replay=replay,
    )
    with workers:
        for _ in range(6):
            assert workers.collect() is True
    assert all(count >= 8 for count in storage.positions())
    found = storage[:]
    schema.check_transitions(found, where="test")
    for row in found:
        episode, step = shown(row[schema.IMAGE])
        later = shown(row["next", *schema.IMAGE])
        assert later == (episode, step + int(row[schema.NUM_EXECUTED]))
        assert episode == int(row[schema.INIT_STATE_ID])
    assert multiprocessing.active_children() == []


def mapped_kib() -> int:
    """Return this process's resident pages of files, KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssFile:")))


def test_resident_memory_does_not_grow_with_what_was_written_or_read(tmp_path):
    image = torch.zeros(2, 3, 256, 256, dtype=torch.uint8)  # 0.4 MB
    observation = {schema.IMAGE[-1]: image, schema.STATE[-1]: torch.zeros(2, 3)}
    batch = rows([(0, 0), (0, 1)])
    batch["observation"].update(observation)
    batch["next", "observation"].update(observation)
    storage = JournalStorage(tmp_path / "replay", 100, Layout.like(batch))
    storage.append(batch)
    before = mapped_kib()
    for episode in range(1, 40):  # 24 MB of images
        for key, value in zip((schema.EPISODE_ID, schema.DECISION), (episode, [0, 1]), strict=True):
            batch[key] = torch.tensor(value).expand(2).reshape(2, 1).clone()
        index = storage.append(batch)
        assert mapped_kib() - before < 4_000
    assert storage.get(index)[schema.IMAGE].shape == (2, 3, 256, 256)
    storage.get(storage.live())
    assert mapped_kib() - before > 16_000
    storage.forget_pages()
    assert mapped_kib() - before < 4_000
    assert len(storage.live()) == 80
