"""Rows whose whole content follows from (episode, decision), so that any mix-up shows."""

import random
from dataclasses import replace

import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.schema import SuiteMeta
from torchrl_vla.storage.layout import transition_layout

META = SuiteMeta(
    name="numbers",
    instructions=("a", "b", "c"),
    task_names=("a", "b", "c"),
    cameras=("front",),
    image_size=8,
    state_names=("episode [1]", "decision [1]", "both [1]"),
    action_names=("x", "y"),
    max_steps=100,
    control_hz=10.0,
)
LAYOUT = transition_layout(META, chunk_size=2)
PACKED = replace(LAYOUT, compress_to=0.75)
"""Has room for the pictures of these rows, the large ones too."""


def length(episode):
    """Decisions of an episode: 1 to 9."""
    return 1 + episode * 7 % 9


def observations(episode, decision):
    """Pictures ``[M, 1, 3, 8, 8]`` and states ``[M, 3]`` that say where they belong.

    Those of every third episode have no two numbers alike and cannot be packed.
    """
    start = (episode * 31 + decision * 7)[:, None]
    number = torch.arange(192) // torch.where(episode % 3 == 0, 1, 12)[:, None]
    image = ((start + number) % 251).to(torch.uint8).view(-1, 1, 3, 8, 8)
    state = torch.stack([episode % 1000, decision, episode + decision], -1).float()
    return TensorDict({"image": image, "state": state}, batch_size=[len(episode)])


def rows(pairs):
    """Return transitions ``[M]`` of ``pairs`` (episode, decision)."""
    episode = torch.tensor([e for e, _ in pairs])
    decision = torch.tensor([d for _, d in pairs])
    done = decision + 1 == torch.tensor([length(e) for e, _ in pairs])
    td = TensorDict(
        {
            "observation": observations(episode, decision),
            "next": {"observation": observations(episode, decision + 1)},
        },
        batch_size=[len(pairs)],
    )
    td[schema.TASK_ID] = episode[:, None] % 3
    td[schema.INIT_STATE_ID] = episode[:, None] * 5
    td[schema.GROUP_ID] = episode[:, None] // 2
    td[schema.EPISODE_ID] = episode[:, None].clone()
    td[schema.DECISION] = decision[:, None].clone()
    td[schema.CHUNK] = torch.stack([episode % 1000, decision], -1).float()[:, None].repeat(1, 2, 1)
    td[schema.POLICY_VERSION] = episode[:, None] // 4
    td[schema.REWARD] = (decision + 1.0)[:, None]
    td[schema.DONE] = done[:, None]
    td[schema.TERMINATED] = (done & (episode % 2 == 0))[:, None]
    td[schema.TRUNCATED] = (done & (episode % 2 == 1))[:, None]
    td[schema.SUCCESS] = (done & (episode % 4 == 0))[:, None]
    td[schema.SIM_ERROR] = torch.zeros_like(done)[:, None]
    td[schema.EXECUTED_MASK] = torch.ones(len(pairs), 2, dtype=torch.bool)
    td[schema.NUM_EXECUTED] = torch.full((len(pairs), 1), 2)
    return td


def pairs_of(td):
    """Return the (episode, decision) that the rows say they are."""
    keys = (schema.EPISODE_ID, schema.DECISION)
    return list(zip(*(td[key].flatten().tolist() for key in keys), strict=True))


def assert_whole(td):
    """Every key of every row is the one of its episode and decision, ``next`` too."""
    expected = rows(pairs_of(td))
    for key in expected.keys(True, True):
        assert torch.equal(td[key], expected[key]), key


class Stream:
    """Batches as an actor writes them: simulator by simulator, each some decisions long.

    Args:
        seed: decides lengths of batches and which rows are missing.
        simulators: how many episodes run side by side.
        first_episode: ids count up from here.
        missing: share of rows that were left out, as those of a diverged simulation are.
    """

    def __init__(self, seed, simulators=3, first_episode=0, missing=0.0):
        self.random, self.missing = random.Random(seed), missing
        self.next_episode = first_episode + simulators
        self.at = [(first_episode + i, 0) for i in range(simulators)]

    def batch(self, decisions=None):
        """Return pairs; ``decisions`` per simulator."""
        decisions = decisions or self.random.randint(1, 6)
        out = []
        for i in range(len(self.at)):
            for _ in range(decisions):
                episode, decision = self.at[i]
                out.append((episode, decision))
                self.at[i] = (episode, decision + 1)
                if decision + 1 == length(episode):
                    self.at[i] = (self.next_episode, 0)
                    self.next_episode += 1
        kept = [pair for pair in out if self.random.random() >= self.missing]
        return kept or out
