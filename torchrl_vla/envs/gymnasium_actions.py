"""Control vectors in [-1, 1] to the actions of a Gymnasium space."""

from __future__ import annotations

from typing import Any

import numpy as np


class Actions:
    """Decodes control vectors for one action space.

    Args:
        space: a ``gymnasium.spaces.Box`` with finite bounds, or a ``Discrete``.

    Raises:
        ValueError: another space.
    """

    def __init__(self, space: Any) -> None:
        self._space = space
        self._low: np.ndarray | None = None
        kind = type(space).__name__
        if kind == "Box" and np.isfinite(space.low).all() and np.isfinite(space.high).all():
            self._low = space.low.ravel().astype(np.float64)
            self._span = space.high.ravel().astype(np.float64) - self._low
            self.names = tuple(
                f"{low:g}..{low + span:g}" for low, span in zip(self._low, self._span, strict=True)
            )
        elif kind == "Discrete":
            self.names = tuple(
                f"preference for action {i + int(space.start)}" for i in range(int(space.n))
            )
        else:
            raise ValueError(
                f"action space {space} does not fit; a Box with finite bounds or a Discrete does: "
                "wrap the environment with gymnasium.wrappers.RescaleAction or similar"
            )

    def decode(self, action: np.ndarray) -> Any:
        """Return the space's action for ``action`` float32 ``[A]`` in [-1, 1].

        Raises:
            ValueError: another number of entries.
        """
        if action.shape != (len(self.names),):
            raise ValueError(f"action has shape {action.shape}, must be ({len(self.names)},)")
        if self._low is None:
            return int(np.argmax(action)) + int(self._space.start)
        fraction = 0.5 * (np.asarray(action, np.float64) + 1.0)
        value = self._low + self._span * fraction
        return value.reshape(self._space.shape).astype(self._space.dtype)
