"""A simulator that counts: deterministic, instant, and as faulty as a test asks for.

No mock: it speaks the whole ``Simulators``/``Suite`` contract, runs in child processes and under
torchrun. Its image says which episode and step it shows, its reward which step was run.
"""

import math
import time
from dataclasses import dataclass, field

import numpy as np

from torchrl_vla.envs.simulator import SimulationError, StepOutcome, SuiteMeta

SIZE = 8
MILLION = 10**6
META = SuiteMeta(
    name="counter",
    instructions=("count up slowly", "count up fast", "count down"),
    task_names=("up", "up", "down"),
    cameras=("front",),
    image_size=SIZE,
    state_names=("init_state_id % 1e6 [1]", "step [1]", "sum of actions [1]"),
    action_names=("added to the sum", "ignored"),
    max_steps=12,
    control_hz=10.0,
)
SPLITS = {name: range(i * 10**11, (i + 1) * 10**11) for i, name in enumerate(("train", "eval"))}


@dataclass(frozen=True)
class CounterSuite:
    """Counter simulators; lists are read at ``init_state_id % len``.

    Step ``t`` (from 0) of an episode pays ``t + 1``, so the reward of a decision tells its steps.
    """

    lengths: tuple[float, ...] = (math.inf,)
    """Control steps after which an episode terminates; infinite leaves it to the time limit."""
    successes: tuple[bool, ...] = (True,)
    """Whether that end is a success."""
    cuts: tuple[float, ...] = (math.inf,)
    """Control steps after which the suite itself cuts an episode off."""
    goal: float = math.inf
    """Sum of the first action's numbers at which an episode terminates with success."""
    broken: tuple[bool, ...] = (False,)
    """Whether physics diverges at step ``fault_step`` of an episode."""
    fault: str = "diverge"
    """``"diverge"`` (SimulationError), ``"raise"`` (a bug), ``"hang"`` (sleeps for ever)."""
    fault_step: int = 0
    meta: SuiteMeta = META
    splits: dict[str, range] = field(default_factory=lambda: SPLITS)

    def simulators(self, num_envs: int) -> "Counters":
        return Counters(self, num_envs)


class Counters:
    """N counters of one suite."""

    def __init__(self, suite: CounterSuite, num_envs: int) -> None:
        self.suite, self.meta, self.num_envs = suite, suite.meta, num_envs
        self.episode = [-1] * num_envs
        self.steps = [0] * num_envs
        self.total = [0.0] * num_envs
        self.actions: list[list[np.ndarray]] = [[] for _ in range(num_envs)]
        """Every control vector that each counter executed, over all episodes."""
        self.resets: list[list[int]] = [[] for _ in range(num_envs)]
        self.closed = 0

    def reset(self, index: int, init_state_id: int) -> None:
        self.episode[index] = init_state_id
        self.steps[index], self.total[index] = 0, 0.0
        self.resets[index].append(init_state_id)

    def task_id(self, index: int) -> int:
        return self.episode[index] % len(self.meta.instructions)

    def _of(self, values: tuple, index: int) -> object:
        return values[self.episode[index] % len(values)]

    def step(self, index: int, action: np.ndarray) -> StepOutcome:
        if self._of(self.suite.broken, index) and self.steps[index] == self.suite.fault_step:
            self._fail(index)
        self.actions[index].append(np.array(action))
        self.steps[index] += 1
        self.total[index] += float(action[0])
        ended = self.steps[index] >= self._of(self.suite.lengths, index)
        reached = self.total[index] >= self.suite.goal
        success = reached or (ended and bool(self._of(self.suite.successes, index)))
        cut = self.steps[index] >= self._of(self.suite.cuts, index)
        return StepOutcome(float(self.steps[index]), ended or reached, success, cut)

    def _fail(self, index: int) -> None:
        if self.suite.fault == "hang":
            time.sleep(3600)
        if self.suite.fault == "raise":
            raise ZeroDivisionError(f"counter {index} has a bug")
        # As in a diverged physics: what could be seen now would be nonsense.
        self.total[index] = math.nan
        raise SimulationError(f"counter {index} diverged")

    def render(self, index: int) -> np.ndarray:
        assert not math.isnan(self.total[index]), "a diverged counter was rendered"
        image = np.zeros((1, 3, SIZE, SIZE), np.uint8)
        image[0, 0] = self.steps[index] % 256
        image[0, 1] = np.resize(np.array([self.episode[index]]).view(np.uint8), (SIZE, SIZE))
        image[0, 2] = 80 * self.task_id(index)
        return image

    def render_frame(self, index: int, size: int) -> np.ndarray:
        return np.full((size, size, 3), 10 * self.steps[index], np.uint8)

    def state(self, index: int) -> np.ndarray:
        numbers = (self.episode[index] % MILLION, self.steps[index], self.total[index])
        return np.array(numbers, np.float32)

    def expert_action(self, index: int) -> np.ndarray:
        return np.array([1.0, 0.0], np.float32)

    def close(self) -> None:
        self.closed += 1


def shown(image: np.ndarray) -> tuple[int, int]:
    """Return ``(init_state_id, step)`` that an image ``[1, 3, h, w]`` shows."""
    raw = np.ascontiguousarray(np.asarray(image)[0, 1, 0, :8])
    return int(raw.view(np.int64)[0]), int(np.asarray(image)[0, 0, 0, 0])
