"""Complete, atomic, resharding checkpoints: what a run needs to go on as if it had never stopped.

A checkpoint is a folder ``root/step-000000200``::

    dcp/                    parameters, buffers, optimizer moments (torch.distributed.checkpoint)
    optimizers.json         hyper-parameters, and which parameter has which moments
    shared.json  shared.safetensors          counters and plain tensors, equal on all ranks
    rank-00000.json  rank-00000.safetensors  what differs per rank, such as random states
    manifest.json           size and blake2b of every file above; written last

It is written under ``root/.tmp-step-...``, synced to disk, given its manifest and then renamed: a
folder named ``step-...`` was complete once, and its manifest tells whether it still is. Any number
of ranks reads what any other number wrote.

Safety: ``dcp/.metadata`` is a pickle, because torch writes it so; nothing else is (tensors in
``dcp/`` are read with ``weights_only=True``). Reading a pickle can run code. The manifest is
checked before any of it is read, so a damaged file is refused; but a manifest is not a signature:
whoever can write the folder can write both. Load only checkpoints whose author you trust.

What this room does not do: save the replay (it saves itself) or decide when to save.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import shutil
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor

from torchrl_vla.policies.shard import reshard
from torchrl_vla.topology import Topology

FORMAT = 1
STATE_KEYS = ("modules", "optimizers", "tensors", "json", "rank_tensors", "rank_json")
_MANIFEST = "manifest.json"
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

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        score: float | None = None,
        topology: Topology,
    ) -> Path:
        """Save ``state``. Collective; on return the checkpoint is on disk and complete.

        A step that was saved before is replaced. If a rank fails, all raise and no new folder
        appears.

        Args:
            step: 0 or more, the same on all ranks.
            state: any of ``"modules"`` {name: module, sharded or plain}, ``"optimizers"`` {name:
                (optimizer, modules that hold its parameters)}, ``"tensors"`` and
                ``"rank_tensors"`` {name: plain Tensor or TensorDict}, ``"json"`` and
                ``"rank_json"`` (plain JSON). Those without ``rank_`` are equal on all ranks.
            score: higher is better, for example a success rate; None if not evaluated.
            topology: the ranks that save.

        Returns:
            The folder.

        Raises:
            KeyError: ``state`` has an unknown key.
            TypeError: something that is neither tensor nor plain JSON.
            ValueError: a negative step, a score that is not finite, either differing between
                ranks, a name with a slash, an optimizer whose parameters are in none of its
                modules.
            RuntimeError: another rank failed; says which and why.
        """
        # Judged from what all ranks passed, so that all of them refuse, or none.
        steps, scores = zip(*topology.gather_objects((step, score)), strict=True)
        if len(set(steps)) > 1 or step < 0:
            raise ValueError(f"ranks save steps {steps}: one step, 0 or more, on all of them")
        if len(set(scores)) > 1 or not all(s is None or math.isfinite(s) for s in scores):
            raise ValueError(f"step {step} has scores {scores}: one finite score, or None, on all")
        folder = self.root / f".tmp-step-{step:09d}"
        shards, index = topology.together(lambda: self._prepare(folder, state, topology))
        dcp.save(shards, storage_writer=dcp.FileSystemWriter(folder / "dcp"))
        files = topology.together(lambda: _write_files(folder, state, index, topology))
        manifest = {"format": FORMAT, "step": step, "score": score}
        manifest["world_size"] = topology.world_size
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
        reason = _why_refused(path, topology)
        if reason is not None:
            raise ValueError(
                f"checkpoint {path} is refused: {reason}. latest() finds an intact one"
            )
        index = json.loads((path / "optimizers.json").read_text())
        targets, moments = topology.together(lambda: _targets(path, state, index))
        dcp.load(targets, storage_reader=dcp.FileSystemReader(path / "dcp"))

        def apply() -> dict[str, Any]:
            for name, module in state.get("modules", {}).items():
                start = f"modules/{name}/"
                own = {k.removeprefix(start): v for k, v in targets.items() if k.startswith(start)}
                set_model_state_dict(module, own)
            for name, (optimizer, _) in state.get("optimizers", {}).items():
                _set_optimizer(optimizer, index[name], moments[name])
            return _read_rest(path, topology)

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
            _check_plain(state.get(key, {}), key)
        shards: dict[str, Tensor] = {}
        for name, module in state.get("modules", {}).items():
            shards |= _module_tensors(name, module)
        index = {}
        for name, (optimizer, modules) in state.get("optimizers", {}).items():
            moments, index[name] = _optimizer_parts(name, optimizer, modules)
            shards |= moments
        if topology.is_main:
            for partial in self._partial():
                shutil.rmtree(partial)
            folder.mkdir(parents=True)
        return shards, index

    def _publish(self, folder: Path, manifest: dict[str, Any], topology: Topology) -> Path:
        final = self.root / f"step-{manifest['step']:09d}"
        if not topology.is_main:
            return final
        for name, entry in manifest["files"].items():
            if not (folder / name).is_file() or (folder / name).stat().st_size != entry["bytes"]:
                raise RuntimeError(
                    f"rank 0 does not see {folder / name} as it was written: put {self.root} on a "
                    "filesystem that all ranks share"
                )
        _write_json(folder / _MANIFEST, manifest | {"digest": _digest_of(manifest)})
        for directory in (folder / "dcp", folder):
            _sync(directory)
        # A folder cannot be replaced in one step. The old one keeps a name that is still found
        # until the new one has its own, so that at no instant is there neither.
        old = _replaced_name(final)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
        folder.rename(final)
        _sync(self.root)
        self._thin_out(final)
        return final

    def _found(self) -> list[Path]:
        return [path for path in self.root.glob("step-*") if _FOLDER.fullmatch(path.name)]

    def _partial(self) -> list[Path]:
        return sorted(self.root.glob(".tmp-step-*"))

    def _scored(self) -> list[Path]:
        scores = {}
        for path in self._found():
            manifest = _manifest_or_reason(path)
            if isinstance(manifest, dict) and manifest["score"] is not None:
                scores[path] = manifest["score"]
        return sorted(scores, key=lambda path: (scores[path], _age(path)), reverse=True)

    def _first_complete(self, candidates: list[Path], topology: Topology | None) -> Path | None:
        refused = []
        for path in candidates:
            reason = _why_refused(path, topology)
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
        sound = [p for p in self._found() if p != old and isinstance(_manifest_or_reason(p), dict)]
        sound.sort(key=_age)
        best = [p for p in self._scored() if p != old][: self.keep_best]
        kept = {newest, *sound[-self.keep_last :], *best}
        for path in [p for p in sound if p not in kept] + [old] * old.exists():
            # Renamed first: a deletion cut short must not leave half a checkpoint in sight.
            doomed = path.rename(self.root / f".tmp-{path.name}-old")
            shutil.rmtree(doomed)


def rng_state() -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Random states of this process: (plain JSON of python and numpy, uint8 tensors of torch).

    Save them as ``"rank_json"`` and ``"rank_tensors"`` entries.
    """
    version, words, gauss = random.getstate()
    _, keys, pos, has_gauss, cached = np.random.get_state()
    plain = {
        "python": [version, list(words), gauss],
        "numpy": [keys.tolist(), int(pos), int(has_gauss), float(cached)],
    }
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    return plain, tensors


def set_rng_state(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Put back what :func:`rng_state` returned.

    Raises:
        RuntimeError: a GPU's state was saved and this process has none.
    """
    if "cuda" in tensors and not torch.cuda.is_available():
        raise RuntimeError(
            "the random state of a GPU was saved and torch sees no GPU: drop its 'cuda' entry to "
            "go on with a CPU whose random numbers differ"
        )
    version, words, gauss = plain["python"]
    random.setstate((version, tuple(words), gauss))
    keys, pos, has_gauss, cached = plain["numpy"]
    np.random.set_state(("MT19937", np.array(keys, np.uint32), pos, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])


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


def _module_tensors(name: str, module: nn.Module) -> dict[str, Tensor]:
    reshard(module)
    tensors = {f"modules/{name}/{key}": v for key, v in get_model_state_dict(module).items()}
    if odd := [key for key, value in tensors.items() if not isinstance(value, Tensor)]:
        raise TypeError(f"{odd} are not tensors; give extra module state as 'json' or 'tensors'")
    return tensors


def _parameter_names(name: str, modules: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    names: dict[nn.Parameter, str] = {}
    for i, module in enumerate(modules):
        reshard(module)
        for key, parameter in module.named_parameters():
            names.setdefault(parameter, f"{i}.{key.replace('_orig_mod.', '')}")
    return names


def _optimizer_parts(
    name: str, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Moments by parameter name, and the rest as plain JSON.

    torch's ``get_optimizer_state_dict`` is not used: for an optimizer that has not stepped it runs
    a step, and it invents moments for parameters that never had a gradient.
    """
    names = _parameter_names(name, modules)
    groups, values, moments = [], {}, {}
    for number, group in enumerate(optimizer.param_groups):
        if odd := [tuple(p.shape) for p in group["params"] if p not in names]:
            raise ValueError(
                f"optimizer {name!r}, group {number}: parameters of shapes {odd} are in none of "
                "its modules; list the modules that own them, after they were sharded"
            )
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()}
        groups.append(plain | {"params": [names[p] for p in group["params"]]})
        for parameter in group["params"]:
            key = names[parameter]
            for field, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    moments[f"optimizers/{name}/{key}/{field}"] = value
                else:
                    values.setdefault(key, {})[field] = value
    index = {"groups": groups, "values": values}
    _check_plain(index, f"optimizer {name!r}")
    return moments, index


def _targets(
    path: Path, state: Mapping[str, Any], index: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, dict[str, dict[str, Tensor]]]]:
    """Tensors to load into, checked against the file: those of modules are the live ones."""
    metadata = dcp.FileSystemReader(path / "dcp").read_metadata().state_dict_metadata
    targets: dict[str, Tensor] = {}
    for name, module in state.get("modules", {}).items():
        tensors = _module_tensors(name, module)
        stored = {key for key in metadata if key.startswith(f"modules/{name}/")}
        _check_fit(f"module {name!r}", path, tensors, {key: metadata[key] for key in stored})
        targets |= tensors
    moments: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, (optimizer, modules) in state.get("optimizers", {}).items():
        parameters = _matched_parameters(name, optimizer, modules, index, path)
        moments[name] = {}
        prefix = f"optimizers/{name}/"
        for key in (key for key in metadata if key.startswith(prefix)):
            parameter, field = key.removeprefix(prefix).rsplit("/", 1)
            targets[key] = _room_for(metadata[key], parameters[parameter])
            moments[name].setdefault(parameter, {})[field] = targets[key]
    return targets, moments


def _matched_parameters(
    name: str,
    optimizer: torch.optim.Optimizer,
    modules: Sequence[nn.Module],
    index: Mapping[str, Any],
    path: Path,
) -> dict[str, nn.Parameter]:
    if name not in index:
        raise ValueError(f"{path} has no optimizer {name!r}; it has {sorted(index)}")
    names = _parameter_names(name, modules)
    here = [[names.get(p) for p in group["params"]] for group in optimizer.param_groups]
    there = [group["params"] for group in index[name]["groups"]]
    if here != there:
        sizes = [len(group) for group in here], [len(group) for group in there]
        odd = sorted({*map(str, chain(*here))} ^ {*chain(*there)})[:5]
        raise ValueError(
            f"optimizer {name!r} has groups of {sizes[0]} parameters, {path} of {sizes[1]}; only "
            f"one of them has {odd} (5 at most shown): build it from the same modules in the same "
            "order"
        )
    return {key: parameter for parameter, key in names.items()}


def _room_for(stored: Any, parameter: nn.Parameter) -> Tensor:
    dtype = stored.properties.dtype
    if stored.size == parameter.shape and stored.size:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(stored.size, dtype=dtype)


def _check_fit(what: str, path: Path, here: Mapping[str, Tensor], there: Mapping[str, Any]) -> None:
    if here.keys() != there.keys():
        raise ValueError(
            f"{what} does not fit {path}: it lacks {sorted(there.keys() - here.keys())} and "
            f"{path.name} lacks {sorted(here.keys() - there.keys())}"
        )
    for key, tensor in here.items():
        stored = there[key]
        if tensor.shape != stored.size or tensor.dtype != stored.properties.dtype:
            raise ValueError(
                f"{key} is {tuple(tensor.shape)} {tensor.dtype}, but {tuple(stored.size)} "
                f"{stored.properties.dtype} in {path}; cast after loading if a cast is wanted"
            )


def _set_optimizer(
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Any],
    moments: Mapping[str, Mapping[str, Tensor]],
) -> None:
    ids, groups, state = {}, [], {}
    for group, live in zip(saved["groups"], optimizer.param_groups, strict=True):
        for name in group["params"]:
            ids[name] = len(ids)
        plain = {k: tuple(v) if isinstance(live.get(k), tuple) else v for k, v in group.items()}
        groups.append(plain | {"params": [ids[name] for name in group["params"]]})
    for name, number in ids.items():
        entry = {**saved["values"].get(name, {}), **moments.get(name, {})}
        if entry:
            state[number] = entry
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _write_files(
    folder: Path, state: Mapping[str, Any], index: dict[str, Any], topology: Topology
) -> dict[str, dict[str, Any]]:
    """Write this rank's plain files; size and digest of all this rank wrote, shards included."""
    rank = f"rank-{topology.rank:05d}"
    _write_plain(folder / rank, state.get("rank_json", {}), state.get("rank_tensors", {}))
    mine = [folder / f"{rank}.json", folder / f"{rank}.safetensors"]
    mine += sorted((folder / "dcp").glob(f"__{topology.rank}_*.distcp"))
    if topology.is_main:
        _write_plain(folder / "shared", state.get("json", {}), state.get("tensors", {}))
        _write_json(folder / "optimizers.json", index)
        names = ("shared.json", "shared.safetensors", "optimizers.json", "dcp/.metadata")
        mine += [folder / name for name in names]
    for path in mine:
        _sync(path)
    return {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "blake2b": _digest(path)}
        for path in mine
    }


def _write_plain(stem: Path, plain: Any, tensors: Mapping[str, Tensor | TensorDictBase]) -> None:
    leaves: dict[str, Tensor] = {}
    layout: dict[str, Any] = {}
    for name, value in tensors.items():
        nested = isinstance(value, TensorDictBase)
        items = value.items(True, True) if nested else [((), value)]
        layout[name] = {"batch_size": list(value.batch_size) if nested else None, "keys": []}
        for key, leaf in items:
            key = list(key) if isinstance(key, tuple) else [key]
            if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor):
                raise TypeError(
                    f"tensors[{name!r}] {key} is a {type(leaf).__name__}; only plain tensors here: "
                    "sharded ones belong to 'modules', other objects to 'json'"
                )
            layout[name]["keys"].append(key)
            # A copy, because safetensors refuses leaves that share memory.
            leaves[json.dumps([name, *key])] = leaf.detach().to("cpu", copy=True).contiguous()
    save_file(leaves, stem.with_suffix(".safetensors"))
    _write_json(stem.with_suffix(".json"), {"json": plain, "layout": layout})


def _read_plain(stem: Path) -> tuple[Any, dict[str, Tensor | TensorDict]]:
    leaves = load_file(stem.with_suffix(".safetensors"))
    content = json.loads(stem.with_suffix(".json").read_text())
    tensors: dict[str, Tensor | TensorDict] = {}
    for name, entry in content["layout"].items():
        if entry["batch_size"] is None:
            tensors[name] = leaves[json.dumps([name])]
            continue
        tensors[name] = TensorDict(batch_size=entry["batch_size"])
        for key in entry["keys"]:
            tensors[name][tuple(key)] = leaves[json.dumps([name, *key])]
    return content["json"], tensors


def _read_rest(path: Path, topology: Topology) -> dict[str, Any]:
    manifest = _read_manifest(path)
    rest = {key: manifest[key] for key in ("step", "score", "world_size")}
    rest["json"], rest["tensors"] = _read_plain(path / "shared")
    rest["rank_json"] = rest["rank_tensors"] = None
    if rest["world_size"] == topology.world_size:
        mine = _read_plain(path / f"rank-{topology.rank:05d}")
        rest["rank_json"], rest["rank_tensors"] = mine
    return rest


def _check_plain(value: Any, where: str) -> None:
    """Refuse what JSON would change: tuples, int keys, tensors, numpy numbers."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a str, JSON would make it one")
            _check_plain(item, f"{where}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            _check_plain(item, f"{where}[{i}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(
            f"{where} is a {type(value).__name__}, JSON would lose it: use list, dict, str, int, "
            "float, bool or None"
        )


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1))
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def _digest_of(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / _MANIFEST).read_text())


def _manifest_or_reason(path: Path) -> dict[str, Any] | str:
    """The manifest if files and sizes agree with it, else what is wrong. Cheap: hashes no file."""
    try:
        manifest = _read_manifest(path)
    except FileNotFoundError:
        return f"it has no {_MANIFEST}: it was never finished, or files were removed"
    except ValueError as error:
        return f"{_MANIFEST} is damaged: {error}"
    if not isinstance(manifest, dict) or manifest.get("digest") != _digest_of(manifest):
        return f"{_MANIFEST} is damaged: its own digest differs"
    if manifest["format"] != FORMAT:
        return f"its format is {manifest['format']}, this version reads {FORMAT}"
    for name, entry in manifest["files"].items():
        if not (path / name).is_file():
            return f"{name} is missing"
        size = (path / name).stat().st_size
        if size != entry["bytes"]:
            return f"{name} has {size} bytes, {entry['bytes']} were written"
    return manifest


def _first_changed(path: Path, manifest: Mapping[str, Any], rank: int, ranks: int) -> str | None:
    for name in sorted(manifest["files"])[rank::ranks]:
        try:
            same = _digest(path / name) == manifest["files"][name]["blake2b"]
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if not same:
            return f"{name} differs from what was written (blake2b)"
    return None


def _why_refused(path: Path, topology: Topology | None) -> str | None:
    """None if every file is as it was written. With a topology, each rank hashes its part."""
    rank, ranks = (topology.rank, topology.world_size) if topology else (0, 1)
    manifest = _manifest_or_reason(path)
    reason = manifest if isinstance(manifest, str) else _first_changed(path, manifest, rank, ranks)
    reasons = topology.gather_objects(reason) if topology else [reason]
    return next((found for found in reasons if found), None)
