"""Q targets, ensembles, alpha, n-step returns, chunk masking, TD3+BC and CQL, by hand."""

import math

import pytest
import torch

from torchrl_vla.objectives.off_policy import (
    Alpha,
    cql_penalty,
    mask_chunk,
    n_step_return,
    reduce_ensemble,
    target_entropy,
    td_target,
)


def column(*numbers):
    return torch.tensor(numbers).view(-1, 1)


def row(*numbers):
    return torch.tensor(numbers).view(1, -1, 1)


def close(actual, *expected):
    assert torch.allclose(actual.flatten(), torch.tensor(expected), atol=1e-5), actual.flatten()


def test_target_bootstraps_truncation_not_termination():
    # B12: 1 + .99*10 = 10.9 truncated; 1.0 terminated, even where the next value is NaN.
    reward, discount = column(1.0, 1.0), column(0.99, 0.99)
    close(td_target(reward, column(10.0, torch.nan), column(False, True), discount), 10.9, 1.0)


def test_target_with_entropy_and_discount_per_decision():
    # .99^8 = .9227447; 1 + .9227447 * (10 - .1*(-2)) = 10.411996.
    args = column(1.0), column(10.0), column(False), column(0.9227447)
    alpha = torch.tensor(0.1, requires_grad=True)
    log_prob = column(-2.0).requires_grad_()
    target = td_target(*args, log_prob, alpha)
    close(target, 10.411996)
    assert not target.requires_grad
    close(td_target(*args), 10.227447)
    close(td_target(*args, bounds=(-0.5, 1.0)), 1.0)
    with pytest.raises(ValueError, match="give both or neither"):
        td_target(*args, log_prob)
    with pytest.raises(ValueError, match="are empty"):
        td_target(*args, bounds=(1.0, 1.0))


def test_ensemble_reduction():
    q = torch.tensor([[3.0, 1.0], [2.0, 5.0], [4.0, 3.0]]).unsqueeze(-1)
    close(reduce_ensemble(q, "min"), 2.0, 1.0)
    close(reduce_ensemble(q, "mean"), 3.0, 3.0)
    close(reduce_ensemble(q, "subset", subset=3), 2.0, 1.0)
    # Every pair occurs: minima of members (0,1), (0,2), (1,2).
    pairs = {tuple(reduce_ensemble(q, "subset").flatten().tolist()) for _ in range(100)}
    assert pairs == {(2.0, 1.0), (3.0, 1.0), (2.0, 3.0)}
    draws = [
        reduce_ensemble(q, "subset", 1, torch.Generator().manual_seed(5)).tolist() for _ in range(2)
    ]
    assert draws[0] == draws[1]
    with pytest.raises(ValueError, match="subset is 4"):
        reduce_ensemble(q, "subset", 4)
    with pytest.raises(ValueError, match="'max'"):
        reduce_ensemble(q, "max")


@pytest.mark.parametrize("kind", ["exp", "softplus"])
@pytest.mark.parametrize("initial", [0.001, 1.0, 20.0])
def test_alpha_starts_where_it_is_told(kind, initial):
    # The reference stores log(exp(a)) as its exp parameter, so that it starts at e^a.
    assert float(Alpha(initial, kind)().detach()) == pytest.approx(initial, rel=1e-5)


@pytest.mark.parametrize("kind", ["exp", "softplus"])
def test_alpha_grows_while_entropy_is_too_low(kind):
    # -alpha * (log_prob + target): log_prob -50 is entropy 50 > -56: gradient lowers alpha.
    alpha = Alpha(0.5, kind)
    target = target_entropy(torch.tensor([[8]]), 7)
    close(target, -56.0)
    loss = alpha.loss(column(-50.0), target)
    close(loss, 0.5 * 106)
    loss.sum().backward()
    assert float(alpha.raw.grad) > 0
    alpha.raw.grad = None
    alpha.loss(column(60.0), target).sum().backward()
    assert float(alpha.raw.grad) < 0
    with pytest.raises(ValueError, match="initial is 0"):
        Alpha(0.0, kind)


def test_target_entropy_counts_executed_numbers():
    # 3 of 8 steps of 7 numbers, -0.5 nats each: -10.5.
    close(target_entropy(torch.tensor([[8], [3]]), 7, -0.5), -28.0, -10.5)


def test_n_step_return_stays_in_its_episode_and_row():
    # Discount .5, an episode ends at 1. 0: 1 + .5*2 = 2. 2: 4 + .5*8 + .25*16 = 12. 3: 8 + 8 = 16.
    reward, done = row(1.0, 2, 4, 8, 16), row(False, True, False, False, False)
    ret, disc, last = n_step_return(reward, done, torch.full((1, 5, 1), 0.5), 3)
    close(ret, 2.0, 2.0, 12.0, 16.0, 16.0)
    close(disc, 0.25, 0.5, 0.125, 0.25, 0.5)
    assert last.flatten().tolist() == [1, 1, 4, 4, 4]


def test_n_step_return_with_own_discounts_and_a_void_decision():
    # n=2, discounts .5 and .25: 1 + .5*2 = 2, discount .125. Decision 2 is void: 1 stops before it.
    ret, disc, last = n_step_return(
        row(1.0, 2.0, 9.0),
        row(False, False, False),
        row(0.5, 0.25, 0.1),
        2,
        row(True, True, False),
    )
    close(ret[:, :2], 2.0, 2.0)
    close(disc[:, :2], 0.125, 0.25)
    assert last.flatten().tolist()[:2] == [1, 1]
    one = n_step_return(row(1.0, 2.0), row(False, False), row(0.5, 0.25), 1)
    close(one[0], 1.0, 2.0)
    close(one[1], 0.5, 0.25)
    with pytest.raises(ValueError, match="n is 0"):
        n_step_return(row(1.0), row(True), row(0.5), 0)


def test_never_executed_actions_cannot_influence_q():
    torch.manual_seed(0)
    q = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * 7, 16), torch.nn.Tanh())
    executed = torch.arange(8) < torch.randint(1, 9, (32, 1))
    chunk = torch.rand(32, 8, 7) * 2 - 1
    other = torch.where(executed.unsqueeze(-1), chunk, torch.nan).requires_grad_()
    value = q(mask_chunk(other, executed))
    assert torch.equal(value, q(mask_chunk(chunk, executed)))
    value.sum().backward()
    assert bool((other.grad[~executed] == 0).all())
    assert bool((other.grad[executed] != 0).all())
    assert not torch.equal(value, q(chunk))
    with pytest.raises(ValueError, match="shapes differ"):
        mask_chunk(chunk, executed[:1])


def test_cql_penalty():
    # mean of exp = (1 + 3)/2 -> ln 2 - .5 = .193147.
    q_data, sampled = column(0.5), torch.tensor([0.0, math.log(3)]).view(2, 1, 1)
    close(cql_penalty(q_data, sampled), 0.193147)
    # Uniform proposal on [-1, 1], density 1/2: the integral is 4 -> ln 4 - .5 = .886294.
    density = torch.full((2, 1, 1), -math.log(2))
    close(cql_penalty(q_data, sampled, density), 0.886294)
    # tau 2: mean(1, sqrt 3) = 1.366025 -> 2 ln 1.366025 - .5 = .123803.
    close(cql_penalty(q_data, sampled, temperature=2.0), 0.123803)
    # More of the same samples change nothing.
    close(cql_penalty(q_data, sampled.repeat(5, 1, 1)), 0.193147)
    with pytest.raises(ValueError, match="shapes differ"):
        cql_penalty(q_data.flatten(), sampled)
