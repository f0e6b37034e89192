"""A suite that cuts its own episodes off: no demonstration, and a state that is bootstrapped."""

import math

import numpy as np
import torch
from counter import SPLITS, CounterSuite

from torchrl_vla import schema
from torchrl_vla.data.demonstrations import attempts
from torchrl_vla.envs.chunked import ChunkedEnv, FixedInitStates
from torchrl_vla.objectives.advantages import gae

FIRST = SPLITS["train"].start


def test_a_demonstration_that_is_cut_off_is_no_success_and_is_not_stepped_on():
    simulators = CounterSuite(cuts=(3,)).simulators(1)

    def teacher(sims, init_state_id, step):
        assert step < 3, "stepped past the end"
        return np.zeros(2, np.float32)

    assert list(attempts(simulators, [FIRST, FIRST + 1], teacher=teacher)) == [None, None]
    assert len(simulators.actions[0]) == 6


def test_its_last_state_is_bootstrapped_as_a_terminal_one_is_not():
    # simulator 0 is cut off in step 3, 1 fails in step 3; a step t pays t + 1
    suite = CounterSuite(lengths=(math.inf, 3), cuts=(3, math.inf), successes=(False,))
    env = ChunkedEnv(suite.simulators(2), FixedInitStates([FIRST, FIRST + 1]), chunk_size=4)
    td = env.reset()
    td[schema.CHUNK] = torch.zeros(2, 4, 2)
    moved = env.step(td)
    assert moved[schema.DONE].all()
    row = {key: moved[key][:, None] for key in (schema.REWARD, schema.DONE, schema.TERMINATED)}
    value = torch.zeros(2, 1, 1)
    _, target = gae(
        row[schema.REWARD],
        value,
        value + 10.0,
        row[schema.DONE],
        row[schema.TERMINATED],
        0.5,
        1.0,
    )
    # 1 + 2 + 3, and half of 10 where the episode could have gone on
    assert target.flatten().tolist() == [11.0, 6.0]
