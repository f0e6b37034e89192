"""Room on the disk: what a run is going to write, and errors that say so when it does not fit."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchrl_vla.topology import Topology

_PER_PARAMETER = 2
"""Moments that an optimizer keeps for each number it trains."""
_CHECKPOINTS = 2
"""Whole ones that are there at the same time at least: the last, and the one being written."""
_SLACK = 1 << 20


def checkpoint_bytes(state: Mapping[str, Any]) -> int:
    """Return about how large a checkpoint of ``state`` is, over all ranks.

    Args:
        state: with ``"modules"`` and ``"optimizers"`` as for
            :meth:`torchrl_vla.checkpoint.Checkpointer.save`.
    """
    modules: dict[str, nn.Module] = state.get("modules", {})
    total = sum(t.numel() * t.element_size() for m in modules.values() for t in _tensors(m))
    for optimizer, _ in state.get("optimizers", {}).values():
        trained = (p for group in optimizer.param_groups for p in group["params"])
        total += _PER_PARAMETER * sum(p.numel() * p.element_size() for p in trained)
    return total


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def check_space(
    folder: Path,
    state: Mapping[str, Any],
    topology: Topology,
    replay_bytes: int = 0,
    replay_folder: Path | None = None,
) -> None:
    """Refuse a run whose replay and checkpoints would not fit on their disks. Collective.

    Ranks on one machine that write to one file system are added up.

    Args:
        folder: of the run; it exists.
        state: what checkpoints will hold.
        topology: the ranks.
        replay_bytes: what this rank's replay is going to take, beyond what it has already.
        replay_folder: on the disk of the replay, if that is not the run's; it exists.

    Raises:
        OSError: ``ENOSPC``.
    """

    def check() -> None:
        one = checkpoint_bytes(state)
        for (_, device), path in {replay_disk: replay_folder, run_disk: folder}.items():
            count = _CHECKPOINTS if device == run_disk[1] else 0
            setting = "run_dir" if count else "replay.folder"
            replays = sum(nbytes for *disk, nbytes in everybody if disk == [host, device])
            needed, free = replays + count * one, shutil.disk_usage(path).free
            if needed > free:
                raise OSError(
                    errno.ENOSPC,
                    f"the run needs {_gb(needed)} on the disk of {path} and {_gb(free)} are free: "
                    f"{_gb(replays)} for the replays of this machine's ranks and {count} "
                    f"checkpoints of {_gb(one)}. Free some space, lower replay.capacity, or choose "
                    f"another {setting}",
                )

    host, replay_folder = socket.gethostname(), replay_folder or folder
    run_disk, replay_disk = ((host, os.stat(path).st_dev) for path in (folder, replay_folder))
    everybody = topology.gather_objects([*replay_disk, replay_bytes])
    topology.together(check)


def no_space(root: Path, what: str, newest: Path | None) -> OSError:
    """Return the error of a checkpoint that the disk has no room for."""
    free = _free(root)
    kept = "there is no checkpoint yet" if newest is None else f"the last checkpoint is {newest}"
    return OSError(
        errno.ENOSPC,
        f"{what} does not fit on the disk of {root}, which has {free} bytes free; {kept}. Free "
        "some space and resume",
    )


def is_full(root: Path, error: BaseException) -> bool:
    """Whether ``error`` comes from a disk without room.

    Libraries on the way replace an ``OSError`` by errors of their own, which may not name it.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            return True
        cause = cause.__cause__ or cause.__context__
    text = str(error)
    return "No space left" in text or _free(root) < _SLACK


def _free(root: Path) -> int:
    return shutil.disk_usage(root if root.exists() else root.parent).free


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3f} GB"
