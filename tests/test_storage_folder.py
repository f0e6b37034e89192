"""Whose folder it is, what is in it, and whether it fits: every refusal says what to do."""

import errno
import json
import os
import pickle
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from disks import small_file_system
from faults.storage_rows import LAYOUT, META, assert_whole, rows
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.storage import layout as layout_module
from torchrl_vla.storage.journal import JournalStorage
from torchrl_vla.storage.layout import Layout, transition_layout


def make(folder, capacity=20, layout=LAYOUT, **settings):
    return JournalStorage(folder, capacity, layout, **settings)


def test_an_earlier_replay_is_refused_unless_it_is_meant(tmp_path):
    make(tmp_path / "r").append(rows([(0, 0)]))
    with pytest.raises(FileExistsError, match=r"/r holds the replay of an earlier run.*'reuse'"):
        make(tmp_path / "r")
    assert len(make(tmp_path / "r", existing="reuse")) == 1
    with pytest.raises(ValueError, match="existing is 'mix'; use 'refuse', 'reuse' or 'empty'"):
        make(tmp_path / "r", existing="mix")
    with pytest.raises(ValueError, match="say existing='reuse'"):
        make(tmp_path / "other", cursor={})


def test_another_layout_is_refused_with_both_named(tmp_path):
    make(tmp_path / "r")
    other = transition_layout(META, chunk_size=4, optional=[schema.TOKENS])
    with pytest.raises(ValueError, match="another layout") as refused:
        make(tmp_path / "r", layout=other, existing="reuse")
    said = str(refused.value)
    there, here = (
        next(x for x in said.splitlines() if x.startswith(f"  {w}:")) for w in ("there", "here")
    )
    assert '"vla_action.chunk": "float32[2, 2]"' in there
    assert '"vla_action.chunk": "float32[4, 2]"' in here
    assert "vla_action.tokens" in here
    assert "vla_action.tokens" not in there
    assert "differs: ['next.executed_mask', 'vla_action.chunk', 'vla_action.tokens']" in said
    with pytest.raises(ValueError, match=r"differs: \['rows', 'slots'\]"):
        make(tmp_path / "r", capacity=21, existing="reuse")
    with pytest.raises(ValueError, match="another layout"):
        JournalStorage.attached(tmp_path / "r", other)


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("irreplaceable")
    for existing in ("refuse", "reuse"):
        with pytest.raises(FileExistsError, match=r"no replay: it holds \['thesis.tex'\]"):
            make(tmp_path, existing=existing)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="is there and not a folder"):
        make(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match="holds no replay"):
        JournalStorage.attached(tmp_path, LAYOUT)


def test_a_creation_that_was_killed_is_made_again(tmp_path):
    make(tmp_path / "r")
    # replay.json gets its name last, after the files have their blocks
    os.rename(tmp_path / "r" / "replay.json", tmp_path / "r" / "replay.json.new")
    (tmp_path / "r" / "boot_id").unlink()
    (tmp_path / "r" / "commit.bin").write_bytes(b"\1" * 64)
    storage = make(tmp_path / "r")
    storage.append(rows([(0, 0)]))
    assert_whole(storage[:])


def test_a_cut_file_is_named(tmp_path):
    storage = make(tmp_path / "r")
    size = (tmp_path / "r" / "task_id.bin").stat().st_size
    assert size == 8 * storage.max_size
    os.truncate(tmp_path / "r" / "task_id.bin", 100)
    with pytest.raises(ValueError, match=rf"task_id.bin has 100 bytes, it was made with {size}"):
        make(tmp_path / "r", existing="reuse")
    (tmp_path / "r" / "task_id.bin").unlink()
    with pytest.raises(ValueError, match=r"task_id.bin has None bytes"):
        make(tmp_path / "r", existing="reuse")


def test_a_replay_that_does_not_fit_is_refused_before_it_is_made(tmp_path):
    slots = 10**12 + 10**12 // 64  # a terabyte of rows, and the spare 64th
    needed = slots * LAYOUT.slot_bytes + 5 * 8
    with pytest.raises(
        OSError, match=rf"needs {needed} bytes .* and the disk has \d+ free"
    ) as said:
        make(tmp_path / "r", capacity=10**12)
    assert said.value.errno == errno.ENOSPC
    assert list((tmp_path / "r").iterdir()) == []


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of 4 MB."""
    with small_file_system(tmp_path / "disk", 4 * 2**20) as folder:
        yield folder


def test_a_small_disk(small_disk, monkeypatch):
    # per slot: image 192, state 12; chunk 16, reward 4, 6 integers 48, 5 + 2 flags, executed 8;
    # 7 words and a float of bookkeeping, 60. Together 347; one header of 5 words.
    assert LAYOUT.slot_bytes == 347
    needed = (20_000 + 20_000 // 64) * LAYOUT.slot_bytes + 5 * 8
    assert needed == 20_312 * 347 + 40
    with pytest.raises(OSError, match=rf"needs {needed} bytes .* and the disk has 4194304 free"):
        make(small_disk / "r", capacity=20_000)
    make(small_disk / "fits", capacity=4_000)
    # The free space that was checked may be gone a moment later: nothing is left behind.
    checked = shutil.disk_usage(small_disk)._replace(free=10**9)
    monkeypatch.setattr(layout_module.shutil, "disk_usage", lambda _: checked)
    with pytest.raises(OSError, match=rf"needs {needed} bytes") as said:
        make(small_disk / "r", capacity=20_000)
    assert said.value.errno == errno.ENOSPC
    assert list((small_disk / "r").iterdir()) == []


def test_a_disk_that_is_full_later_takes_every_row(small_disk):
    # Without blocks of their own, pages of sparse files would end this process by SIGBUS.
    storage = make(small_disk / "r", capacity=4_000)
    with pytest.raises(OSError, match="No space left"):
        (small_disk / "filler").write_bytes(b"x" * 4_000_000)
    for start in range(0, 4_000, 50):
        storage.append(rows([(8 + 9 * e, 0) for e in range(start, start + 50)]))
    assert len(storage) >= 2_000  # one observation of two is an end: the ring is full
    assert_whole(storage[-100:])
    storage.release()
    assert len(make(small_disk / "r", capacity=4_000, existing="reuse")) == len(storage)


def test_files_have_their_blocks_before_the_first_row(tmp_path):
    make(tmp_path / "r", capacity=500)
    for path in (tmp_path / "r").glob("*.bin"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size, path.name


def said_to(user, folder):
    """Return the PermissionError that ``user`` gets for a replay in ``folder``."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgid(user)
            os.setuid(user)
            make(folder)
        except PermissionError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as opened:
        return opened.read().decode()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_folder_of_somebody_else_or_read_only():
    nobody = 65534
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = Path(parent) / "r"
        folder.mkdir()
        assert said_to(nobody, folder) == (
            f"{folder} belongs to user 0 and this process runs as user {nobody}; a replay is "
            "written by its owner only"
        )
        os.chown(folder, nobody, nobody)
        folder.chmod(0o555)
        assert said_to(nobody, folder) == (
            f"{folder} cannot be written to; a replay needs a writable folder"
        )


class TestRows:
    def test_unknown_and_missing_keys_are_named(self, tmp_path):
        storage = make(tmp_path / "r")
        row = rows([(0, 0)])
        row["extra"] = torch.zeros(1)
        with pytest.raises(KeyError, match=r"lack \[\] and have \['extra'\]"):
            storage.append(row)
        with pytest.raises(KeyError, match=r"lack \['task_id'\] and have \[\]"):
            storage.append(row.exclude("extra", "task_id"))
        row = rows([(0, 0)])
        row["next", *schema.STATE] = torch.zeros(1, 2)
        with pytest.raises(ValueError, match=r"next.observation.state is torch.float32 \[2\]"):
            storage.append(row)
        row = rows([(0, 0)])
        row[schema.TASK_ID] = row[schema.TASK_ID].int()
        with pytest.raises(ValueError, match=r"task_id is torch.int32"):
            storage.append(row)
        assert len(storage) == 0

    def test_any_tensordict_has_a_layout(self, tmp_path):
        # keys of a plain TorchRL collector, and a dtype that NumPy does not know
        example = TensorDict(
            {
                "pixels": torch.zeros(3, 4, dtype=torch.bfloat16),
                "action": torch.zeros(3, 2),
                "collector": {"traj_ids": torch.tensor([0, 0, 0])},
                "step_count": torch.tensor([[0], [1], [2]]),
                "next": {"pixels": torch.zeros(3, 4, dtype=torch.bfloat16)}
                | {"done": torch.tensor([[False], [False], [True]])},
            },
            batch_size=[3],
        )
        example["pixels"][:] = torch.arange(3)[:, None]
        example["next", "pixels"][:] = torch.arange(1, 4)[:, None]
        marks = {"episode": ("collector", "traj_ids"), "decision": "step_count"}
        layout = Layout.like(example, observations=["pixels"], **marks)
        storage = make(tmp_path / "r", layout=layout)
        storage.append(example)
        found = storage[:]
        assert all(torch.equal(found[key], example[key]) for key in example.keys(True, True))
        with pytest.raises(KeyError, match=r"lack \['wrist', 'next.wrist'\]"):
            Layout.like(example, observations=["wrist"], **marks)
        example["log"] = torch.zeros(3)
        with pytest.raises(ValueError, match=r"\[\('log',\)\] are names of the replay's own files"):
            Layout.like(example, observations=["pixels"], **marks)

    def test_the_layout_of_this_package(self):
        assert {c.name for c in LAYOUT.observations} == {"observation.image", "observation.state"}
        described = LAYOUT.described()
        assert described["observation.image"] == "uint8[1, 3, 8, 8] once"
        assert described["next.executed_mask"] == "bool[2]"
        assert "next.observation.image" not in described
        json.dumps(described)


def test_ranges():
    with pytest.raises(ValueError, match="capacity is 3 for 4 lanes"):
        make("unused", capacity=3, lanes=4)
    with pytest.raises(ValueError, match="spare is 3"):
        make("unused", spare=3)


def test_a_pickle_carries_no_rows(tmp_path):
    storage = make(tmp_path / "r", capacity=2000)
    storage.append(rows([(8, 0), (8, 1)]))
    raw = pickle.dumps(storage)
    assert len(raw) < 5000
    again = pickle.loads(raw)
    assert_whole(again[:])
    storage.append(rows([(8, 2)]))
    assert len(again) == 3  # the same files
