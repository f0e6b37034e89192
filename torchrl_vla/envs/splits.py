"""Initial-state ids by purpose, for suites that draw a state from any non-negative integer.

Pure arithmetic. Every split leaves room for ``IDS_PER_STREAM`` ids per actor stream.
"""

from __future__ import annotations

SPLIT_SIZE = 10**15
SPLITS: dict[str, range] = {
    name: range(i * SPLIT_SIZE, (i + 1) * SPLIT_SIZE)
    for i, name in enumerate(("train", "eval", "ground", "demo"))
}
"""No id is in two splits."""


def position_in_split(init_state_id: int) -> int:
    """Return how far ``init_state_id`` lies behind the start of its split, >= 0.

    Raises:
        ValueError: the id is in no split.
    """
    limit = len(SPLITS) * SPLIT_SIZE
    if not 0 <= init_state_id < limit:
        raise ValueError(
            f"init_state_id is {init_state_id}, must be in 0..{limit - 1}: take ids from a split "
            f"of {sorted(SPLITS)}"
        )
    return init_state_id % SPLIT_SIZE
