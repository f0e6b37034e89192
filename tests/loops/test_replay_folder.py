"""Which rows a run goes on with: its own at the checkpoint's cursor, none, or an error."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from faults.storage_rows import META, Stream, pairs_of, rows

from torchrl_vla import schema
from torchrl_vla.loops.pacing import Pacer, PaceSettings
from torchrl_vla.loops.plans import Budget, CheckpointPlan
from torchrl_vla.loops.replay_folder import ReplayFolder, layout_of, saved_replays
from torchrl_vla.replay import ReplayFeed, Sampling

PACE = PaceSettings(0.5, 8, 2)
POLICY = SimpleNamespace(out_keys=[schema.CHUNK])


def run_of(folder: Path, rank: int = 0, ranks: int = 1, deterministic: bool = False):
    """What a ReplayFolder asks a run for; one process stands for every rank."""
    topology = SimpleNamespace(
        rank=rank, world_size=ranks, is_main=rank == 0, gather_objects=lambda mine: [mine] * ranks
    )
    return SimpleNamespace(
        folder=folder,
        topology=topology,
        suite=SimpleNamespace(meta=META),
        chunk_size=2,
        deterministic=deterministic,
        saves=CheckpointPlan(None, 10),
        budget=Budget(updates=100),
    )


def folder_of(
    tmp_path: Path, lanes: int = 1, capacity: int = 60, parent: Path | None = None, **settings
) -> ReplayFolder:
    return ReplayFolder(run_of(tmp_path, **settings), POLICY, capacity, lanes, PACE, parent)


def saved_run(tmp_path: Path, ranks: int = 1, **settings):
    """Write 12 rows that are counted and 6 more; return the checkpoint and the first 12."""
    place = folder_of(tmp_path, ranks=ranks, **settings)
    buffer, saved = place.open(resume=False, loaded=None)
    assert saved is None
    feed = ReplayFeed(buffer, demonstrations=None, rule=Sampling(4), encode=None, seed=0)
    stream = Stream(0)
    counted = stream.batch(4)
    buffer.extend(rows(counted))
    feed.absorb()
    replays = saved_replays(place.run, feed, Pacer(PACE, 4, 4, updates=3, decisions=12))
    assert len(replays) == ranks
    buffer.extend(rows(stream.batch(2)))
    buffer.storage.release()
    return {"json": {"replays": replays}}, counted


def test_a_resumed_run_has_the_rows_that_were_counted(tmp_path: Path):
    loaded, counted = saved_run(tmp_path)
    place = folder_of(tmp_path)
    assert place.planned_bytes() == 0  # it has its blocks
    buffer, saved = place.open(resume=True, loaded=loaded)
    assert pairs_of(buffer[:]) == counted
    assert saved["pacer"] == {"updates": 3, "decisions": 12}


def test_a_run_that_reached_no_checkpoint_starts_without_rows(tmp_path: Path):
    saved_run(tmp_path)
    buffer, saved = folder_of(tmp_path).open(resume=True, loaded=None)
    assert (len(buffer), saved) == (0, None)


def test_rows_of_an_earlier_run_are_never_mixed_in(tmp_path: Path):
    loaded, _ = saved_run(tmp_path)
    with pytest.raises(FileExistsError, match="rank-0 holds the replay of an earlier run"):
        folder_of(tmp_path).open(resume=False, loaded=None)
    with pytest.raises(ValueError, match=r"(?s)another layout.*there:.*here:.*differs: \['lanes'"):
        folder_of(tmp_path, lanes=2).open(resume=True, loaded=loaded)
    other, _ = saved_run(tmp_path / "other")
    with pytest.raises(ValueError, match="the cursor is of replay"):
        folder_of(tmp_path).open(resume=True, loaded=other)


def test_another_number_of_ranks(tmp_path: Path):
    loaded, counted = saved_run(tmp_path, ranks=2)
    with pytest.warns(UserWarning, match=r"2 ranks saved this run; .* of ranks \[1\] are left"):
        buffer, _ = folder_of(tmp_path).open(resume=True, loaded=loaded)
    assert pairs_of(buffer[:]) == counted
    buffer, saved = folder_of(tmp_path, rank=2, ranks=3).open(resume=True, loaded=loaded)
    assert (len(buffer), saved) == (0, None)


def test_a_replay_that_is_gone(tmp_path: Path):
    loaded, _ = saved_run(tmp_path)
    (tmp_path / "replay").rename(tmp_path / "elsewhere")
    with pytest.raises(RuntimeError, match="cannot go on without them"):
        folder_of(tmp_path, deterministic=True).open(resume=True, loaded=loaded)
    with pytest.warns(UserWarning, match="is not there: the run goes on with an empty replay"):
        buffer, saved = folder_of(tmp_path).open(resume=True, loaded=loaded)
    assert (len(buffer), saved) == (0, None)


def test_a_deterministic_run_never_overwrites_what_its_checkpoint_has(tmp_path: Path):
    place = folder_of(tmp_path, deterministic=True)
    planned = place.planned_bytes()
    buffer, _ = place.open(resume=False, loaded=None)
    on_disk = sum(path.stat().st_size for path in place.path.glob("*.bin"))
    assert planned == on_disk
    feed = ReplayFeed(buffer, demonstrations=None, rule=Sampling(4), encode=None, seed=0)
    stream = Stream(1)
    for _ in range(20):  # several times round the ring
        buffer.extend(rows(stream.batch(3)))
    feed.absorb()
    known = pairs_of(buffer[:])
    loaded = {"json": {"replays": saved_replays(place.run, feed, Pacer(PACE, 4, 4))}}
    # 10 updates at 0.5 per decision, and 8 of slack: 28 decisions until the next save
    buffer.extend(rows(stream.batch(9)))
    buffer.storage.release()
    again, _ = folder_of(tmp_path, deterministic=True).open(resume=True, loaded=loaded)
    assert pairs_of(again[:]) == known
    for _ in range(20):
        again.extend(rows(stream.batch(3)))
    again.storage.release()
    with (
        pytest.warns(UserWarning, match="of the cursor's rows are no longer there"),
        pytest.raises(RuntimeError, match="cannot go on as it would have"),
    ):
        folder_of(tmp_path, deterministic=True).open(resume=True, loaded=loaded)


def test_packed_pictures_plan_less_room(tmp_path: Path):
    def planned(share: float | None) -> int:
        return ReplayFolder(
            run_of(tmp_path), POLICY, 60, 1, PACE, compress_to=share
        ).planned_bytes()

    # 60 rows and 64 to spare, 192 bytes of picture each; two words per slot say where one is
    assert planned(0.25) == planned(None) - 124 * 192 + 31 * 192 + 124 * 16
    with pytest.raises(ValueError, match="compress_to is 2; it must be above 0 and at most 1"):
        planned(2)


def test_the_layout_is_what_the_policy_writes():
    policy = SimpleNamespace(out_keys=[schema.TOKENS, schema.LOG_PROBS, "state_value"])
    names = {column.name for column in layout_of(policy, run_of(Path())).columns}
    assert {"vla_action.tokens", "vla_action.log_probs", "vla_action.chunk"} <= names
    assert "state_value" not in names


class TestAnotherDisk:
    @pytest.fixture
    def disk(self, tmp_path: Path) -> Path:
        (tmp_path / "disk").mkdir()
        return tmp_path / "disk"

    def test_a_resumed_run_finds_its_rows_whatever_the_setting_says(self, tmp_path, disk):
        run = tmp_path / "run"
        run.mkdir()
        loaded, counted = saved_run(run, parent=disk)
        (place,) = disk.iterdir()
        assert place.name.startswith("run-")
        assert (place / "replay.json").exists()
        for parent in (None, disk):
            buffer, saved = folder_of(run, parent=parent).open(resume=True, loaded=loaded)
            assert pairs_of(buffer[:]) == counted
            assert saved is not None
            assert buffer.storage.folder == place
            buffer.storage.release()
        (tmp_path / "third").mkdir()
        with pytest.raises(ValueError, match=rf"has its rows in {place}; leave replay\.folder"):
            folder_of(run, parent=tmp_path / "third")
        assert folder_of(run).planned_bytes() == 0

    def test_runs_that_name_one_folder_do_not_share_rows(self, tmp_path, disk):
        for name, rank in (("a", 0), ("b", 0), ("b", 1)):
            (tmp_path / name).mkdir(exist_ok=True)
            place = folder_of(tmp_path / name, rank=rank, ranks=2, parent=disk)
            assert place.planned_bytes() > 0
            assert place.disk == disk
            buffer, _ = place.open(resume=False, loaded=None)
            buffer.extend(rows([(8 + rank, 0)]))
        assert len(list(disk.iterdir())) == 3
        with pytest.raises(FileExistsError, match="holds the replay of an earlier run"):
            folder_of(tmp_path / "a", parent=disk).open(resume=False, loaded=None)

    def test_on_a_machine_without_its_rows_a_run_gets_new_ones(self, tmp_path, disk):
        run = tmp_path / "run"
        run.mkdir()
        loaded, _ = saved_run(run, parent=disk)
        (place,) = disk.iterdir()
        place.rename(tmp_path / "elsewhere")
        with pytest.warns(UserWarning, match=f"{place}, where the rows .* with an empty replay"):
            buffer, saved = folder_of(run, parent=disk).open(resume=True, loaded=loaded)
        assert (len(buffer), saved) == (0, None)
        assert buffer.storage.folder.parent == disk
        assert buffer.storage.folder != place

    def test_rows_of_the_run_folder_stay_there(self, tmp_path, disk):
        saved_run(tmp_path)
        with pytest.raises(ValueError, match=r"has its rows in .*/replay/rank-0; leave"):
            folder_of(tmp_path, parent=disk)

    def test_a_folder_that_is_missing_or_holds_other_things_is_refused(self, tmp_path, disk):
        with pytest.raises(
            FileNotFoundError, match=r"replay\.folder is .*/nowhere, and there is no"
        ):
            folder_of(tmp_path, parent=tmp_path / "nowhere")
        run = tmp_path / "run"
        run.mkdir()
        loaded, _ = saved_run(run, parent=disk)
        with pytest.raises(ValueError, match="holds a replay of another layout"):
            folder_of(run, capacity=61, parent=disk).open(resume=True, loaded=loaded)
        (place,) = disk.iterdir()
        (place / "replay.json").unlink()
        with pytest.raises(FileExistsError, match="is not empty and no replay"):
            folder_of(run, parent=disk).open(resume=True, loaded=loaded)
