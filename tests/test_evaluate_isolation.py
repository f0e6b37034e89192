"""Evaluation leaves the training process as it was, also when it fails."""

import random

import numpy as np
import pytest
import torch
from envs.counter import SPLITS, CounterSuite
from tensordict.nn import TensorDictModuleBase
from torch import nn

from torchrl_vla import schema
from torchrl_vla.evaluate import run_episodes

FIRST = SPLITS["eval"].start


class Greedy(TensorDictModuleBase):
    """Draws from every global generator and looks at its own flags; may fail in a decision."""

    def __init__(self, fails_at: int | None):
        super().__init__()
        self.in_keys, self.out_keys = [schema.IMAGE], [schema.CHUNK]
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(1)
        self.frozen = nn.Sequential(nn.Dropout(0.5), nn.Linear(1, 1))
        self.frozen[0].eval()
        self.fails_at, self.calls = fails_at, 0

    def forward(self, td):
        assert not any(module.training for module in self.modules())
        self.calls += 1
        if self.calls == self.fails_at:
            raise ArithmeticError("a policy that fails")
        random.random()
        np.random.rand()
        self.norm(self.dropout(torch.rand(1, 1)))
        td.set(schema.CHUNK, torch.rand(1, 4, 2))
        return td


def snapshot(policy: nn.Module):
    return (
        torch.get_rng_state().tolist(),
        [part.tolist() if hasattr(part, "tolist") else part for part in np.random.get_state()],
        random.getstate(),
        [module.training for module in policy.modules()],
        {key: value.tolist() for key, value in policy.state_dict().items()},
        torch.get_num_threads(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("fails_at", [None, 3])
def test_nothing_of_the_process_changes(fails_at: int | None):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        policy = Greedy(fails_at)
        before = snapshot(policy)
        simulators = CounterSuite().simulators(2)
        if fails_at is None:
            run_episodes(policy, simulators, range(FIRST, FIRST + 3), chunk_size=4)
            assert policy.calls > 3
        else:
            with pytest.raises(ArithmeticError):
                run_episodes(policy, simulators, range(FIRST, FIRST + 3), chunk_size=4)
        assert snapshot(policy) == before
    finally:
        torch.set_num_threads(threads)


def test_a_failing_simulator_changes_nothing_either():
    policy = Greedy(None)
    before = snapshot(policy)
    suite = CounterSuite(broken=(True,), fault="raise", fault_step=2)
    with pytest.raises(ZeroDivisionError):
        run_episodes(policy, suite.simulators(1), [FIRST], chunk_size=4)
    assert snapshot(policy) == before


def test_training_goes_on_as_if_there_had_been_no_evaluation():
    def losses(looks: bool) -> list[float]:
        torch.manual_seed(0)
        policy = Greedy(None)
        model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        out = []
        for _ in range(4):
            if looks:
                run_episodes(policy, CounterSuite().simulators(1), [FIRST], chunk_size=4)
            loss = (model(torch.rand(16, 1)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        return out

    assert losses(True) == losses(False)
