"""Recording and its views, with a simulator whose every number is known."""

import numpy as np
import pytest
import torch

from torchrl_vla import schema
from torchrl_vla.data.demonstrations import (
    Episode,
    PolicyTeacher,
    attempts,
    cloning_samples,
    decision_transitions,
    record,
)
from torchrl_vla.envs.simulator import SimulationError, StepOutcome, SuiteMeta


class Line:
    """One number, moved by the action; solved at 1 or beyond. Odd ids start out of reach."""

    meta = SuiteMeta(
        name="line",
        instructions=("go right", "go on"),
        task_names=("go", "go"),
        cameras=("front",),
        image_size=2,
        state_names=("x [m]",),
        action_names=("dx",),
        max_steps=6,
        control_hz=10.0,
    )
    num_envs = 1

    def reset(self, index: int, init_state_id: int) -> None:
        self.x, self.id = (-100.0 if init_state_id % 2 else 0.0), init_state_id

    def task_id(self, index: int) -> int:
        return self.id // 2 % 2

    def step(self, index: int, action: np.ndarray) -> StepOutcome:
        if self.id == 99:
            raise SimulationError("diverged")
        self.x += float(action[0])
        solved = self.x >= 1
        return StepOutcome(float(solved), solved, solved)

    def render(self, index: int) -> np.ndarray:
        return np.full((1, 3, 2, 2), max(0, int(10 * self.x + 0.5)), np.uint8)

    def state(self, index: int) -> np.ndarray:
        return np.array([self.x], np.float32)

    def expert_action(self, index: int) -> np.ndarray:
        return np.array([0.25], np.float32)

    def close(self) -> None:
        """Nothing to free."""


def test_the_expert_is_recorded_and_failures_are_left_out():
    # From 0 by 0.25: four steps reach 1.0. Odd ids fail, id 99 diverges.
    tried = list(attempts(Line(), [0, 1, 2, 99]))
    assert [episode is None for episode in tried] == [False, True, False, True]
    first = tried[0]
    assert first.state[:, 0].tolist() == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert first.image[:, 0, 0, 0, 0].tolist() == [0, 3, 5, 8, 10]
    assert first.reward.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert (first.task_id, tried[2].task_id, tried[2].init_state_id) == (0, 1, 2)
    assert len(record(Line(), [0, 1, 2])) == 2
    with pytest.raises(ValueError, match="solved none"):
        record(Line(), [1, 3])


def test_noise_moves_the_robot_and_not_the_label():
    episode = next(iter(attempts(Line(), [0], noise=0.1, max_steps=12)))
    assert torch.equal(episode.expert, torch.full_like(episode.expert, 0.25))
    assert not torch.equal(episode.executed, episode.expert)
    # What happened is what was executed.
    assert torch.allclose(episode.state[1:, 0], episode.executed[:, 0].cumsum(0))
    assert episode.executed.abs().max() <= 1


def test_noise_levels_take_turns():
    episodes = list(attempts(Line(), [0, 2, 4, 6], noise=[0.0, 0.05], max_steps=12))
    exact = [torch.equal(e.executed, e.expert) for e in episodes]
    assert exact == [True, False, True, False]
    for bad in (-0.1, [0.1, -0.1], []):
        with pytest.raises(ValueError, match="it must be at least 0"):
            list(attempts(Line(), [0], noise=bad))


class Counting(torch.nn.Module):
    """Says which call it is: chunk of 3 actions, all ``0.1 * calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, td):
        self.calls += 1
        self.seen.append((float(td[schema.STATE]), int(td[schema.TASK_ID]), tuple(td.shape)))
        return td.set(schema.CHUNK, torch.full((1, 3, 1), 0.1 * self.calls))


def test_a_policy_acts_in_chunks_and_forgets_the_rest_at_a_new_episode():
    # Field case B11. Calls give 0.1, 0.2, 0.3...: 3 x 0.1 + 3 x 0.2 = 0.9, then 0.3: solved at 1.2
    # in step 7. The second episode must begin with call 4, not with the rest of call 3.
    policy = Counting()
    tried = list(attempts(Line(), [0, 2], teacher=PolicyTeacher(policy), max_steps=8))
    wanted = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.2, 0.2, 0.3])
    assert torch.allclose(tried[0].expert[:, 0], wanted)
    assert torch.allclose(tried[1].expert[:, 0], torch.tensor([0.4, 0.4, 0.4]))
    assert policy.calls == 4
    states = [state for state, _, _ in policy.seen]
    assert states == pytest.approx([0.0, 0.3, 0.9, 0.0])
    assert [task for _, task, _ in policy.seen] == [0, 0, 0, 1]
    assert {shape for _, _, shape in policy.seen} == {(1,)}


class Drawing(torch.nn.Module):
    def forward(self, td):
        return td.set(schema.CHUNK, torch.rand(1, 2, 1))


def test_a_drawing_policy_repeats_itself_and_leaves_the_random_state_alone():
    teacher = PolicyTeacher(Drawing())
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = list(attempts(Line(), [0, 2], teacher=teacher))
    assert torch.equal(torch.get_rng_state(), before)
    again = list(attempts(Line(), [2], teacher=teacher))
    assert torch.equal(first[1].expert, again[0].expert)
    assert not torch.equal(first[0].expert[:2], first[1].expert[:2])


def five_steps() -> Episode:
    actions = torch.arange(1.0, 6.0)[:, None] / 10
    return Episode(
        image=torch.arange(6, dtype=torch.uint8).reshape(6, 1, 1, 1, 1).expand(6, 1, 3, 2, 2),
        state=torch.arange(6.0)[:, None],
        expert=actions,
        executed=actions + 0.01,
        reward=torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
        task_id=1,
        init_state_id=7,
    )


def test_chunks_are_padded_at_the_end_of_the_episode():
    # Field case B09: chunk 8, three steps left: three real numbers, five padded and masked.
    samples = cloning_samples([five_steps()], 8)
    assert len(samples) == 5
    third = samples[2]
    assert third[schema.EXECUTED_MASK].tolist() == [True] * 3 + [False] * 5
    wanted = torch.tensor([0.3, 0.4, 0.5, 0, 0, 0, 0, 0])
    assert torch.allclose(third[schema.CHUNK][:, 0], wanted)
    assert samples[schema.EXECUTED_MASK].sum(1).tolist() == [5, 4, 3, 2, 1]


def test_chunks_do_not_reach_into_the_next_episode():
    samples = cloning_samples([five_steps(), five_steps()], 4)
    assert samples[schema.EXECUTED_MASK].sum(1).tolist() == [4, 4, 3, 2, 1] * 2
    assert samples[schema.STATE][:, 0].tolist() == [0, 1, 2, 3, 4] * 2


def test_decisions_are_transitions_of_the_replay():
    # Chunks of 2 over 5 steps: rewards gamma^k r: the last decision has one step, reward 1.
    rows = decision_transitions([five_steps()], 2, 0.5, stride=2)
    schema.check_transitions(rows, where="the test")
    assert rows[schema.NUM_EXECUTED][:, 0].tolist() == [2, 2, 1]
    assert rows[schema.TERMINATED][:, 0].tolist() == [False, False, True]
    assert rows[schema.REWARD][:, 0].tolist() == [0.0, 0.0, 1.0]
    assert rows["next", "observation", "state"][:, 0].tolist() == [2.0, 4.0, 5.0]
    assert torch.allclose(rows[schema.CHUNK][0, :, 0], torch.tensor([0.11, 0.21]))
    # Stride 1: decision at step 3 sees the reward one step later, so 0.5.
    assert decision_transitions([five_steps()], 2, 0.5)[schema.REWARD][3] == 0.5
