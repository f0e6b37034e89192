"""The 50 Meta-World tasks in words, and the field's task sets. Plain data: nothing is imported.

Meta-World (Yu et al. 2019, arXiv:1910.10897; names of version 3) has no instructions; these are
ours, one per task. Opposite tasks differ in the verb only, so that the words matter.
"""

from __future__ import annotations

from collections.abc import Sequence

SENTENCES: dict[str, str] = {
    "assembly-v3": "put the ring of the wrench over the peg",
    "basketball-v3": "drop the ball into the basket",
    "bin-picking-v3": "move the block from the red bin into the blue bin",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button down from above",
    "button-press-topdown-wall-v3": "press the button down from above behind the wall",
    "button-press-v3": "press the button on the front of the box",
    "button-press-wall-v3": "press the button on the front of the box behind the wall",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring of the wrench off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "hand-insert-v3": "put the gripper into the hole",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "open the faucet",
    "faucet-close-v3": "close the faucet",
    "hammer-v3": "hit the nail with the hammer",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "push the peg into the hole in the side of the box",
    "pick-place-wall-v3": "pick up the puck and carry it over the wall to the goal",
    "pick-out-of-hole-v3": "pick the puck out of the hole",
    "reach-v3": "reach the goal",
    "push-back-v3": "pull the block back to the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and carry it to the goal",
    "plate-slide-v3": "slide the plate into the net",
    "plate-slide-side-v3": "slide the plate into the net from the side",
    "plate-slide-back-v3": "slide the plate out of the net",
    "plate-slide-back-side-v3": "slide the plate out of the net to the side",
    "peg-unplug-side-v3": "pull the peg out of the hole in the side of the box",
    "soccer-v3": "kick the ball into the goal",
    "stick-push-v3": "push the thermos to the goal with the stick",
    "stick-pull-v3": "pull the thermos to the goal with the stick",
    "push-wall-v3": "push the puck around the wall to the goal",
    "reach-wall-v3": "reach the goal behind the wall",
    "shelf-place-v3": "put the block on the shelf",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-open-v3": "open the window",
    "window-close-v3": "close the window",
}
"""Instruction by the package's task name."""

MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
"""The field's set of ten tasks."""

TASK_SETS: dict[str, tuple[str, ...]] = {"mt10": MT10, "mt50": tuple(SENTENCES)}


def choose_tasks(task: str | Sequence[str]) -> tuple[str, ...]:
    """Return the tasks that a setting names, in its order.

    Args:
        task: a task (``"drawer-open-v3"``), a set (``"mt10"``, ``"mt50"``) or a list of tasks.

    Raises:
        ValueError: an unknown task, one named twice, or none at all.
    """
    names = TASK_SETS.get(task, (task,)) if isinstance(task, str) else tuple(task)
    unknown = [name for name in names if name not in SENTENCES]
    if unknown:
        raise ValueError(
            f"task {unknown[0]!r} is unknown; use one of {sorted(SENTENCES)}, a set of "
            f"{sorted(TASK_SETS)}, or a list of tasks"
        )
    if not names or len(set(names)) < len(names):
        raise ValueError(f"task is {list(names)}; name at least one task, each once")
    return names
