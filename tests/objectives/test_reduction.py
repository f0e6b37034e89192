"""One global mean, whatever the micro-batch split and the number of ranks (B22); no broadcasts."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from torchrl_vla.objectives.advantages import normalise, reinforce_plus_plus
from torchrl_vla.objectives.ppo import clipped_surrogate, value_loss
from torchrl_vla.objectives.reduction import (
    check_same_shape,
    count,
    global_count,
    masked_mean,
    masked_sum,
    per_number,
)

# Two sequences with 1 and 3 valid tokens, advantages +1 and -1, ratio 1.
MASK = torch.tensor([[1, 0, 0], [1, 1, 1]]).bool().unsqueeze(-1)
ADVANTAGE = torch.tensor([[1.0], [-1.0]])


def share(rows, log_ratio, total, mask=MASK, advantage=ADVANTAGE):
    loss = clipped_surrogate(log_ratio[rows], advantage[rows], 0.2, 0.2)
    return masked_mean(loss, mask[rows], total)


# Losses -1 (1 token) and +1 (3 tokens): (-1 + 3) / 4 = 0.5. A mean of means gives 0.0.
@pytest.mark.parametrize("split", [[[0, 1]], [[0], [1]]])
def test_any_split_gives_the_global_mean(split):
    log_ratio = torch.zeros(2, 3, 1, requires_grad=True)
    total = count(MASK)
    losses = [share(rows, log_ratio, total) for rows in split]
    sum(losses).backward()
    assert sum(losses).item() == pytest.approx(0.5)
    # d(-A r)/d(log r) / 4 = -A/4 on the valid tokens, 0 elsewhere.
    assert log_ratio.grad.flatten().tolist() == [-0.25, 0, 0, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("split", [[[0, 1, 2]], [[0], [1], [2]]])
def test_a_fully_masked_sample_counts_nothing(split):
    # With the third sample, all masked, still 0.5; 0.4 is the failure (denominator 5).
    mask = torch.cat([MASK, torch.zeros(1, 3, 1, dtype=torch.bool)])
    advantage = torch.cat([ADVANTAGE, torch.tensor([[5.0]])])
    log_ratio = torch.zeros(3, 3, 1)
    losses = [share(rows, log_ratio, count(mask), mask, advantage) for rows in split]
    assert sum(losses).item() == pytest.approx(0.5)


@pytest.mark.parametrize("total", [None, 0])
def test_all_masked_is_zero_with_zero_gradient(total):
    x = torch.tensor([[1.0], [torch.nan]], requires_grad=True)
    loss = masked_mean(x, torch.zeros(2, 1, dtype=torch.bool), total)
    loss.backward()
    assert loss.item() == 0
    assert x.grad.flatten().tolist() == [0, 0]


def test_wrong_total_is_not_plausible():
    assert masked_mean(torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool), 0).isinf()


def test_masked_nan_adds_nothing_and_half_is_summed_in_float32():
    x = torch.tensor([1.0, torch.nan])
    assert float(masked_sum(x, torch.tensor([True, False]))) == 1
    # bfloat16 cannot represent 257; float32 can.
    ones = torch.ones(257, dtype=torch.bfloat16)
    assert float(masked_sum(ones, torch.ones(257, dtype=torch.bool))) == 257


def test_flat_against_column_is_refused():
    # B24: values [1,2,3] against returns [[1],[2],[3]] would give 1.333333, the truth is 0.
    values, returns = torch.tensor([1.0, 2, 3]), torch.tensor([[1.0], [2], [3]])
    for bad in (
        lambda: value_loss(values, returns),
        lambda: masked_sum(returns, torch.ones(3, dtype=torch.bool)),
        lambda: clipped_surrogate(torch.zeros(3, 1), values, 0.2, 0.2),
        lambda: clipped_surrogate(torch.zeros(3, 8, 7), values, 0.2, 0.2),
        lambda: check_same_shape(a=values, b=returns),
    ):
        with pytest.raises(ValueError, match="shape"):
            bad()
    assert float(value_loss(values.unsqueeze(-1), returns).mean()) == 0


def test_decision_scalar_spreads_over_its_chunk():
    spread = per_number(torch.tensor([[1.0], [2.0]]), torch.zeros(2, 3, 2))
    assert spread[0].unique().tolist() == [1]
    assert spread[1].unique().tolist() == [2]


def test_integer_mask_is_refused():
    with pytest.raises(TypeError, match=r"torch\.int64"):
        count(torch.ones(3, dtype=torch.long))


DATA = torch.tensor([[1.0], [2.0], [4.0], [100.0]])
VALID = torch.tensor([[True], [True], [True], [False]])
REWARD = torch.tensor([[[0.0], [0.0], [1.0]], [[0.0], [0.0], [50.0]]])
DONE = torch.tensor([[[False], [False], [True]], [[False], [True], [True]]])
REAL = torch.tensor([[[True], [True], [True]], [[True], [True], [False]]])


def everything(rank, world):
    """What depends on the global batch, from this rank's share of the rows."""
    mine = slice(rank, None, world)
    log_ratio = torch.zeros(2, 3, 1)
    loss = share(mine, log_ratio, global_count(MASK[mine]))
    return {
        "loss": loss.view(1),
        "normalise": normalise(DATA[mine], VALID[mine]).flatten(),
        "reinforce": reinforce_plus_plus(REWARD[mine], DONE[mine], REAL[mine], 0.5).flatten(),
    }


def on_rank(rank, folder):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    try:
        torch.save(everything(rank, 2), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path):
    mp.spawn(on_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone = everything(0, 1)
    # The shares of the ranks add up; 0.5 as in one process.
    assert float(first["loss"] + second["loss"]) == pytest.approx(0.5)
    # Rows were dealt out alternately: 0, 2 and 1, 3.
    dealt = torch.stack([first["normalise"], second["normalise"]], 1).flatten()
    assert torch.allclose(dealt, alone["normalise"], atol=1e-7)
    dealt = torch.cat([first["reinforce"], second["reinforce"]])
    assert torch.allclose(dealt, alone["reinforce"], atol=1e-7)
