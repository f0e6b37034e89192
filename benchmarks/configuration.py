"""The numbers that training uses, read from ``conf/algo``: benchmarks have none of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf


def settings_of(algorithm: str) -> dict[str, Any]:
    """Return ``conf/algo/<algorithm>.yaml`` with its references resolved."""
    path = Path(__file__).parents[1] / "conf" / "algo" / f"{algorithm}.yaml"
    return OmegaConf.to_container(OmegaConf.load(path), resolve=True)


def arguments(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section without what only the launcher reads (``_target_`` and the like)."""
    return {key: value for key, value in section.items() if not key.startswith("_")}
