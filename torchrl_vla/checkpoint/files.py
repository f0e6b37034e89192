"""The plain files of a checkpoint, its manifest, and what makes a folder refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchrl_vla.topology import Topology

FORMAT = 1
MANIFEST = "manifest.json"


def write_files(
    folder: Path, state: Mapping[str, Any], index: dict[str, Any], topology: Topology
) -> dict[str, dict[str, Any]]:
    """Write this rank's plain files; size and digest of all this rank wrote, shards included."""
    rank = f"rank-{topology.rank:05d}"
    _write_plain(folder / rank, state.get("rank_json", {}), state.get("rank_tensors", {}))
    mine = [folder / f"{rank}.json", folder / f"{rank}.safetensors"]
    mine += sorted((folder / "dcp").glob(f"__{topology.rank}_*.distcp"))
    if topology.is_main:
        _write_plain(folder / "shared", state.get("json", {}), state.get("tensors", {}))
        write_json(folder / "optimizers.json", index)
        names = ("shared.json", "shared.safetensors", "optimizers.json", "dcp/.metadata")
        mine += [folder / name for name in names]
    for path in mine:
        sync(path)
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
    write_json(stem.with_suffix(".json"), {"json": plain, "layout": layout})


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


def read_rest(path: Path, topology: Topology) -> dict[str, Any]:
    """Return all that is not in the shards; rank entries are None for another world size."""
    manifest = _read_manifest(path)
    rest = {key: manifest[key] for key in ("step", "score", "world_size")}
    rest["json"], rest["tensors"] = _read_plain(path / "shared")
    rest["rank_json"] = rest["rank_tensors"] = None
    if rest["world_size"] == topology.world_size:
        mine = _read_plain(path / f"rank-{topology.rank:05d}")
        rest["rank_json"], rest["rank_tensors"] = mine
    return rest


def check_plain(value: Any, where: str) -> None:
    """Refuse what JSON would change: tuples, int keys, tensors, numpy numbers."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} is not a str, JSON would make it one")
            check_plain(item, f"{where}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_plain(item, f"{where}[{i}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        raise TypeError(
            f"{where} is a {type(value).__name__}, JSON would lose it: use list, dict, str, int, "
            "float, bool or None"
        )


def write_json(path: Path, content: Any) -> None:
    """Write JSON and force it to disk."""
    path.write_text(json.dumps(content, indent=1))
    sync(path)


def sync(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def digest_of(manifest: Mapping[str, Any]) -> str:
    """Return the digest of a manifest's own content."""
    body = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text())


def manifest_or_reason(path: Path) -> dict[str, Any] | str:
    """The manifest if files and sizes agree with it, else what is wrong. Cheap: hashes no file."""
    try:
        manifest = _read_manifest(path)
    except FileNotFoundError:
        return f"it has no {MANIFEST}: it was never finished, or files were removed"
    except ValueError as error:
        return f"{MANIFEST} is damaged: {error}"
    if not isinstance(manifest, dict) or manifest.get("digest") != digest_of(manifest):
        return f"{MANIFEST} is damaged: its own digest differs"
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


def why_refused(path: Path, topology: Topology | None) -> str | None:
    """None if every file is as it was written. With a topology, each rank hashes its part."""
    rank, ranks = (topology.rank, topology.world_size) if topology else (0, 1)
    manifest = manifest_or_reason(path)
    reason = manifest if isinstance(manifest, str) else _first_changed(path, manifest, rank, ranks)
    reasons = topology.gather_objects(reason) if topology else [reason]
    return next((found for found in reasons if found), None)
