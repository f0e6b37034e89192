"""Rounds as actors make them, without simulators: lanes that run episodes one after the other."""

from collections.abc import Callable

import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.envs.chunked import InitStateStream
from torchrl_vla.objectives.credit import VALUE

STEPS, ACTIONS = 2, 2


class Lanes:
    """N lanes; episode ``e`` of the stream lasts ``length(e)`` decisions and pays ``pay(e)``.

    Args:
        num: ``N``.
        length: decisions of an episode, by its number in the stream.
        pay: reward of its last decision.
        group_size: episodes per initial state.
        broken: whether the simulation diverges at its last decision.
    """

    def __init__(
        self,
        num: int,
        length: Callable[[int], int],
        pay: Callable[[int], float] = lambda e: 1.0,
        group_size: int = 1,
        broken: Callable[[int], bool] = lambda e: False,
    ) -> None:
        self.length, self.pay, self.broken = length, pay, broken
        self.stream = InitStateStream(range(10**9), 0, group_size)
        self.ids = [self.stream.draw() for _ in range(num)]
        self.decision = [0] * num

    def round(self, decisions: int, version: int = 0) -> TensorDict:
        """Return ``[N, decisions]``; every number of a chunk was executed, its log-prob is -1."""
        steps = [[self._step(lane) for lane in range(len(self.ids))] for _ in range(decisions)]
        td = TensorDict(batch_size=[len(self.ids), decisions])
        names = (schema.GROUP_ID, schema.EPISODE_ID, schema.DECISION, schema.REWARD)
        for name, values in zip(names, torch.tensor(steps).permute(2, 1, 0), strict=False):
            td[name] = values.unsqueeze(-1).long()
        table = torch.tensor(steps).transpose(0, 1)
        td[schema.REWARD] = table[..., 3:4].float()
        for name, column in (
            (schema.DONE, 4),
            (schema.TERMINATED, 5),
            (schema.TRUNCATED, 6),
            (schema.SIM_ERROR, 6),
        ):
            td[name] = table[..., column : column + 1] > 0
        shape = (*td.batch_size, STEPS, ACTIONS)
        td[schema.CHUNK], td[schema.LOG_PROBS] = torch.zeros(shape), torch.full(shape, -1.0)
        td[schema.EXECUTED_MASK] = torch.ones(*td.batch_size, STEPS, dtype=torch.bool)
        td[schema.NUM_EXECUTED] = torch.full((*td.batch_size, 1), STEPS)
        td[schema.POLICY_VERSION] = torch.full((*td.batch_size, 1), version)
        td[VALUE] = torch.zeros(*td.batch_size, 1)
        td[schema.STATE] = torch.zeros(*td.batch_size, 3)
        td["next", "observation", "state"] = torch.zeros(*td.batch_size, 3)
        return td

    def _step(self, lane: int) -> list[float]:
        _, group, episode = self.ids[lane]
        now = self.decision[lane]
        done = now + 1 == self.length(episode)
        bad = done and self.broken(episode)
        pay = self.pay(episode) if done and not bad else 0.0
        if done:
            self.ids[lane], self.decision[lane] = self.stream.draw(), 0
        else:
            self.decision[lane] += 1
        return [group, episode, now, pay, done, done and not bad, bad]


def pairs(rows: TensorDict) -> list[tuple[int, int]]:
    """Return ``(episode, decision)`` of every row, in order."""
    keys = (schema.EPISODE_ID, schema.DECISION)
    return list(zip(*(rows[key].flatten().tolist() for key in keys), strict=True))
