"""Hashes of the files that a suite's scenes are built from, for the record of an evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def hash_files(paths: Iterable[Path], root: Path | None = None) -> str:
    """Return one SHA-256 over names and contents of files; their order does not matter.

    Args:
        paths: the files.
        root: names are relative to it; the bare names if None.
    """
    whole = hashlib.sha256()
    named = {
        path.name if root is None else path.relative_to(root).as_posix(): path for path in paths
    }
    for name in sorted(named):
        with named[name].open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{name} {content}\n".encode())
    return whole.hexdigest()


def hash_folder(root: Path) -> str:
    """Return :func:`hash_files` of all files below ``root``.

    Raises:
        FileNotFoundError: there is no file.
    """
    files = [path for path in root.rglob("*") if path.is_file()]
    if not files:
        raise FileNotFoundError(f"{root} holds no file to hash")
    return hash_files(files, root)
