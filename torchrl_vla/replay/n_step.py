"""Looking several decisions ahead, inside an episode."""

from __future__ import annotations

import torch
from tensordict import TensorDict

from torchrl_vla import schema
from torchrl_vla.objectives.critics import FEATURES, STEPS


def n_step(rows: TensorDict, n: int, gamma: float) -> TensorDict:
    """Let every row look up to ``n`` decisions ahead, inside its episode and inside ``rows``.

    Reward becomes the discounted sum, ``next`` (features, done, terminated) that of the last
    decision taken in, and ``steps_to_next_obs`` the control steps until there. Later decisions were
    chosen by the behaviour policy of that time; with a small ``n`` that bias is accepted, as in
    n-step Q-learning generally.

    Args:
        rows: ``[M]`` in time order per simulator, with ``episode_id`` and ``decision``.
        n: decisions, at least 1.
        gamma: discount per control step.
    """
    episode, decision = rows[schema.EPISODE_ID][:, 0], rows[schema.DECISION][:, 0]
    linked = torch.zeros(len(rows), dtype=torch.bool)
    linked[:-1] = (episode[1:] == episode[:-1]) & (decision[1:] == decision[:-1] + 1)
    linked &= ~rows[schema.DONE][:, 0]
    reward, executed = rows[schema.REWARD], rows[schema.NUM_EXECUTED]
    total, steps = reward.clone(), executed.clone()
    last = torch.arange(len(rows))
    going = linked.clone()
    for _ in range(n - 1):
        following = last[going] + 1
        total[going] += gamma ** steps[going] * reward[following]
        steps[going] += executed[following]
        last[going] = following
        going[going.clone()] = linked[following]
    out = rows.clone(recurse=False)
    out["next"] = rows["next"].clone(recurse=False)
    out[schema.REWARD], out[STEPS] = total, steps
    for key in (("next", FEATURES), schema.DONE, schema.TERMINATED):
        out[key] = rows[key][last]
    return out
