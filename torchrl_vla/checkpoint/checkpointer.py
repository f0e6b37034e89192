"""Saving, finding, verifying, loading and thinning out the checkpoints of one run."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from torchrl_vla.checkpoint.background import Background, Beside
from torchrl_vla.checkpoint.files import (
    FORMAT,
    MANIFEST,
    check_plain,
    digest_of,
    manifest_or_reason,
    read_rest,
    sync,
    why_refused,
    write_files,
    write_json,
)
from torchrl_vla.checkpoint.space import checkpoint_bytes, is_full, no_space
from torchrl_vla.checkpoint.tensors import (
    module_tensors,
    optimizer_parts,
    set_optimizer,
    targets_of,
)
from torchrl_vla.topology import Topology

_PLAIN_KEYS = ("tensors", "json", "rank_tensors", "rank_json")
STATE_KEYS = ("modules", "optimizers", *_PLAIN_KEYS)
_FOLDER = re.compile(r"step-(\d{9,})(\.replaced)?")
_T = TypeVar("_T")


class Checkpointer:
    """Saves, finds, verifies, loads and thins out the checkpoints of one run.

    Args:
        root: folder of the run's checkpoints, on a filesystem that all ranks share.
        keep_last: how many of the newest to keep, at least 1.
        keep_best: how many of those with the highest score to keep beside them.

    Raises:
        ValueError: ``keep_last`` or ``keep_best`` is out of range.
    """

    def __init__(self, root: Path, keep_last: int = 3, keep_best: int = 1) -> None:
        if keep_last < 1 or keep_best < 0:
            raise ValueError(
                f"keep_last is {keep_last} (at least 1) and keep_best {keep_best} (at least 0)"
            )
        self.root = Path(root)
        self.keep_last = keep_last
        self.keep_best = keep_best
        self._background = Background()
        self._beside: Beside | None = None
        self._stager: DefaultStager | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        score: float | None = None,
        topology: Topology,
        background: bool = False,
    ) -> Path:
        """Save ``state``. Collective; on return the checkpoint is on disk and complete.

        A step that was saved before is replaced. If a rank fails, all raise and no new folder
        appears. In the background ``state`` is only copied before this returns; the rest happens
        in a thread, and what goes wrong there is raised by the next call of this or of
        :meth:`wait`. The copy's memory is kept for the next save.

        Args:
            step: 0 or more, the same on all ranks.
            state: any of ``"modules"`` {name: module, sharded or plain}, ``"optimizers"`` {name:
                (optimizer, modules that hold its parameters)}, ``"tensors"`` and
                ``"rank_tensors"`` {name: plain Tensor or TensorDict}, ``"json"`` and
                ``"rank_json"`` (plain JSON). Those without ``rank_`` are equal on all ranks.
            score: higher is better, for example a success rate; None if not evaluated.
            topology: the ranks that save.
            background: return when ``state`` is copied.

        Returns:
            The folder that has, or will have, the checkpoint.

        Raises:
            KeyError: ``state`` has an unknown key.
            TypeError: something that is neither tensor nor plain JSON.
            ValueError: a negative step, a score that is not finite, either differing between
                ranks, a name with a slash, an optimizer whose parameters are in none of its
                modules.
            RuntimeError: another rank failed; says which and why.
            OSError: ``ENOSPC``, the disk has no room; earlier checkpoints are as they were.
        """
        self.wait()
        # Judged from what all ranks passed, so that all of them refuse, or none.
        steps, scores = zip(*topology.gather_objects((step, score)), strict=True)
        if len(set(steps)) > 1 or step < 0:
            raise ValueError(f"ranks save steps {steps}: one step, 0 or more, on all of them")
        if len(set(scores)) > 1 or not all(s is None or math.isfinite(s) for s in scores):
            raise ValueError(f"step {step} has scores {scores}: one finite score, or None, on all")
        folder = self.root / f".tmp-step-{step:09d}"
        shards, index = topology.together(lambda: self._prepare(folder, state, topology))
        manifest = {"format": FORMAT, "step": step, "score": score}
        manifest["world_size"] = topology.world_size
        writer = dcp.FileSystemWriter(folder / "dcp")
        with self.naming_a_full_disk(f"checkpoint of step {step}"):
            if not background:
                dcp.save(shards, storage_writer=writer)
                return self._complete(folder, state, index, manifest, topology)
            if self._beside is None:
                self._beside = Beside.of(topology)
                # Keeps its memory: fresh pages would cost more than the copy.
                self._stager = DefaultStager(StagingOptions(False, False, False, False))
            beside = self._beside
            copies = {key: deepcopy(state.get(key, {})) for key in _PLAIN_KEYS}
            written = dcp.async_save(
                shards,
                storage_writer=writer,
                process_group=beside.group,
                async_stager=self._stager,
            )

        def finish() -> None:
            with self.naming_a_full_disk(f"checkpoint of step {step}"):
                written.result()
                self._complete(folder, copies, index, manifest, beside)

        self._background.start(finish)
        return self._final(step)

    def wait(self) -> None:
        """Wait until a save in the background is complete; raises what went wrong in it."""
        self._background.wait()

    @contextmanager
    def naming_a_full_disk(self, what: str) -> Iterator[None]:
        """Let an error that comes from a full disk say so, and which checkpoint is the last.

        Raises:
            OSError: ``ENOSPC``, in place of what the body raised.
        """
        try:
            yield
        except (Exception, CheckpointException) as error:  # torch's is a BaseException
            if is_full(self.root, error):
                newest = max(self._found(), key=_age, default=None)
                raise no_space(self.root, what, newest) from error
            raise

    def _complete(
        self,
        folder: Path,
        state: Mapping[str, Any],
        index: dict[str, Any],
        manifest: dict[str, Any],
        topology: Topology,
    ) -> Path:
        files = topology.together(lambda: write_files(folder, state, index, topology))
        manifest["files"] = dict(ChainMap(*topology.gather_objects(files)))
        return topology.together(lambda: self._publish(folder, manifest, topology))

    def latest(self, topology: Topology | None = None) -> Path | None:
        """The complete checkpoint of the highest step; refused ones are printed with the reason.

        Args:
            topology: if given, a collective: ranks share the reading and agree. Without, this
                process verifies alone.

        Returns:
            None if no checkpoint was ever finished in ``root``.

        Raises:
            FileNotFoundError: there are finished checkpoints and none is intact; says what is
                wrong with each.
        """
        self.wait()
        found, partial = _on_main(topology, lambda: (self._found(), self._partial()))
        if topology is None or topology.is_main:
            for path in partial:
                print(
                    f"checkpoint {path} is refused: its save or removal was cut short", flush=True
                )
        return self._first_complete(sorted(found, key=_age, reverse=True), topology)

    def best(self, topology: Topology | None = None) -> Path | None:
        """The complete checkpoint of the highest score, of equals the newest; else as latest().

        Returns:
            None if no checkpoint has a score.
        """
        self.wait()
        scored = _on_main(topology, self._scored)
        return self._first_complete(scored, topology)

    def load(self, path: Path, state: Mapping[str, Any], topology: Topology) -> dict[str, Any]:
        """Load a checkpoint into the modules and optimizers of ``state``. Collective.

        Everything is verified before anything is unpickled or changed. What ``state`` does not name
        is not loaded; what it names must be there, with equal names, shapes and dtypes.

        Args:
            path: a folder from :meth:`latest` or :meth:`best`.
            state: ``"modules"`` and ``"optimizers"`` as in :meth:`save`, changed in place.
            topology: the ranks that load, of any number.

        Returns:
            ``{"step", "score", "world_size", "tensors", "json", "rank_tensors", "rank_json"}``,
            tensors on the CPU. The two per-rank entries are None when the number of ranks that
            saved differs from ``topology.world_size``: rank states of one layout mean nothing in
            another.

        Raises:
            ValueError: the checkpoint is damaged or does not fit ``state``.
        """
        reason = why_refused(path, topology)
        if reason is not None:
            raise ValueError(
                f"checkpoint {path} is refused: {reason}. latest() finds an intact one"
            )
        index = json.loads((path / "optimizers.json").read_text())
        targets, moments = topology.together(lambda: targets_of(path, state, index))
        dcp.load(targets, storage_reader=dcp.FileSystemReader(path / "dcp"))

        def apply() -> dict[str, Any]:
            for name, module in state.get("modules", {}).items():
                start = f"modules/{name}/"
                own = {k.removeprefix(start): v for k, v in targets.items() if k.startswith(start)}
                set_model_state_dict(module, own)
            for name, (optimizer, _) in state.get("optimizers", {}).items():
                set_optimizer(optimizer, index[name], moments[name])
            return read_rest(path, topology)

        return topology.together(apply)

    def _prepare(
        self, folder: Path, state: Mapping[str, Any], topology: Topology
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if unknown := sorted(set(state) - set(STATE_KEYS)):
            raise KeyError(f"state has {unknown}; the keys of a checkpoint are {STATE_KEYS}")
        named = [*state.get("modules", {}), *state.get("optimizers", {})]
        if odd := [name for name in named if "/" in name]:
            raise ValueError(f"names {odd} contain '/', which separates names from parameters")
        # Before the shards are written, which may take minutes.
        for key in ("json", "rank_json"):
            check_plain(state.get(key, {}), key)
        shards: dict[str, Tensor] = {}
        for name, module in state.get("modules", {}).items():
            shards |= module_tensors(name, module)
        index = {}
        for name, (optimizer, modules) in state.get("optimizers", {}).items():
            moments, index[name] = optimizer_parts(name, optimizer, modules)
            shards |= moments
        if topology.is_main:
            for partial in self._partial():
                shutil.rmtree(partial)
            folder.mkdir(parents=True)
            if (needed := checkpoint_bytes(state)) > shutil.disk_usage(folder).free:
                folder.rmdir()
                newest = max(self._found(), key=_age, default=None)
                raise no_space(self.root, f"a checkpoint of {needed} bytes", newest)
        return shards, index

    def _final(self, step: int) -> Path:
        return self.root / f"step-{step:09d}"

    def _publish(self, folder: Path, manifest: dict[str, Any], topology: Topology) -> Path:
        final = self._final(manifest["step"])
        if not topology.is_main:
            return final
        for name, entry in manifest["files"].items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != entry["bytes"]:
                raise RuntimeError(
                    f"rank 0 does not see {folder / name} as it was written: put {self.root} on a "
                    "filesystem that all ranks share"
                )
        write_json(folder / MANIFEST, manifest | {"digest": digest_of(manifest)})
        for directory in (folder / "dcp", folder):
            sync(directory)
        # A folder cannot be replaced in one step. The old one keeps a name that is still found
        # until the new one has its own, so that at no instant is there neither.
        old = _replaced_name(final)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        folder.rename(final)
        sync(self.root)
        self._thin_out(final)
        return final

    def _found(self) -> list[Path]:
        return [path for path in self.root.glob("step-*") if _FOLDER.fullmatch(path.name)]

    def _partial(self) -> list[Path]:
        return sorted(self.root.glob(".tmp-step-*"))

    def _scored(self) -> list[Path]:
        scores = {}
        for path in self._found():
            manifest = manifest_or_reason(path)
            if isinstance(manifest, dict) and manifest["score"] is not None:
                scores[path] = manifest["score"]
        return sorted(scores, key=lambda path: (scores[path], _age(path)), reverse=True)

    def _first_complete(self, candidates: list[Path], topology: Topology | None) -> Path | None:
        refused = []
        for path in candidates:
            reason = why_refused(path, topology)
            if reason is None:
                return path
            refused.append(f"{path.name}: {reason}")
            if topology is None or topology.is_main:
                print(f"checkpoint {path} is refused: {reason}", flush=True)
        if refused:
            raise FileNotFoundError(
                f"no intact checkpoint in {self.root}. Found and refused: {'; '.join(refused)}. "
                "Restore one of them, or move them away to start anew"
            )
        return None

    def _thin_out(self, newest: Path) -> None:
        """Delete old checkpoints; ``newest`` was just written, so one complete one remains."""
        old = _replaced_name(newest)
        sound = [p for p in self._found() if p != old and isinstance(manifest_or_reason(p), dict)]
        sound.sort(key=_age)
        best = [p for p in self._scored() if p != old][: self.keep_best]
        kept = {newest, *sound[-self.keep_last :], *best}
        for path in [p for p in sound if p not in kept] + [old] * old.exists():
            # Renamed first: a deletion cut short must not leave half a checkpoint in sight.
            doomed = path.rename(self.root / f".tmp-{path.name}-old")
            shutil.rmtree(doomed)


def _on_main(topology: Topology | None, action: Callable[[], _T]) -> _T:
    """Look at the folder from one rank, so that all ranks see the same."""
    if topology is None:
        return action()
    found = topology.together(lambda: action() if topology.is_main else None)
    return topology.broadcast_object(found)


def _replaced_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.replaced")


def _age(path: Path) -> tuple[int, bool]:
    match = _FOLDER.fullmatch(path.name)
    return int(match[1]), match[2] is None
