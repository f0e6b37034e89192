"""Says what to install when a suite's own package is not there."""

from __future__ import annotations

import importlib.util


def require(package: str, extra: str) -> None:
    """Check that the Python package ``package`` is installed, without importing it.

    Raises:
        ModuleNotFoundError: it is not; the message names the extra that brings it.
    """
    if importlib.util.find_spec(package) is None:
        raise ModuleNotFoundError(
            f"this environment needs the package {package!r}, which is not installed; get it with "
            f"pip install 'torchrl_vla[{extra}]'"
        )
