"""GAE over decisions (B12, B14), return-to-go and whitening, worked by hand."""

import pytest
import torch
from torchrl.objectives.value.functional import vec_generalized_advantage_estimate

from torchrl_vla.objectives.advantages import (
    cut_at_invalid,
    gae,
    normalise,
    reinforce_plus_plus,
    return_to_go,
)


def row(*numbers):
    """One env, [1, T, 1]."""
    return torch.tensor(numbers).view(1, -1, 1)


def close(actual, *expected):
    assert torch.allclose(actual.flatten(), torch.tensor(expected), atol=1e-5), actual.flatten()


def test_truncation_bootstraps_with_the_final_observation_and_termination_never():
    # B12: r=1, gamma=.99, V(s)=5, V(final)=10. Truncated: 1 + .99*10 = 10.9; terminated: 1.
    # 5.95 would be V(s), -1.97 the observation after the reset.
    for terminated, target in ((False, 10.9), (True, 1.0)):
        advantage, value_target = gae(
            row(1.0), row(5.0), row(10.0), row(True), row(terminated), 0.99, 0.95
        )
        close(value_target, target)
        close(advantage, target - 5)


def test_values_do_not_leak_across_a_truncation_inside_the_row():
    # B14, gamma .9, lambda .8; the second episode begins at index 2.
    # 3: 1 - 2 = -1 (terminated). 2: 1 + .9*2 - 2 + .72*(-1) = .08. 1: 1 + .9*3 - .5 = 3.2 (stop).
    # 0: 1 + .9*.5 - .5 + .72*3.2 = 3.254.
    reward, value, next_value = row(1.0, 1, 1, 1), row(0.5, 0.5, 2, 2), row(0.5, 3, 2, 4)
    done, terminated = row(False, True, False, True), row(False, False, False, True)
    advantage, target = gae(reward, value, next_value, done, terminated, 0.9, 0.8)
    close(advantage, 3.254, 3.2, 0.08, -1.0)
    close(target, 3.754, 3.7, 2.08, 1.0)
    apart = [
        gae(*(x[:, part] for x in (reward, value, next_value, done, terminated)), 0.9, 0.8)[0]
        for part in (slice(0, 2), slice(2, 4))
    ]
    assert torch.equal(torch.cat(apart, 1), advantage)


def test_discount_per_decision():
    # deltas: 1 + .5*4 - 1 = 2; 3 + .25*8 - 4 = 1 (truncated). A0 = 2 + .5*.5*1 = 2.25.
    args = row(1.0, 3.0), row(1.0, 4.0), row(4.0, 8.0), row(False, True)
    discount = row(0.5, 0.25)
    close(gae(*args, row(False, False), discount, 0.5)[0], 2.25, 1.0)
    # Terminated: delta 3 - 4 = -1, A0 = 2 - .25 = 1.75.
    close(gae(*args, row(False, True), discount, 0.5)[0], 1.75, -1.0)


def test_row_that_is_cut_without_done_bootstraps():
    close(gae(row(1.0), row(5.0), row(10.0), row(False), row(False), 0.99, 0.95)[1], 10.9)


def test_invalid_decision_is_a_boundary_and_no_data():
    # Decision 1 is void: NaN there must reach nobody. A0 = 1 + .5*4 - 1 = 2 (no recursion).
    nan = torch.nan
    advantage, target = gae(
        row(1.0, nan, 1.0),
        row(1.0, nan, 2.0),
        row(4.0, nan, 4.0),
        row(False, False, True),
        row(False, False, True),
        0.5,
        1.0,
        valid=row(True, False, True),
    )
    close(advantage, 2.0, 0.0, -1.0)
    close(target, 3.0, 0.0, 1.0)


def test_boundaries_stand_before_and_at_invalid_decisions():
    # Decision 2 is void: no recursion from 1 into it, nor from it into 3. 4 is done anyway.
    done, valid = row(False, False, False, False, True), row(True, True, False, True, True)
    assert cut_at_invalid(done, valid).flatten().tolist() == [False, True, True, False, True]


def test_loop_with_tensor_discount_agrees_with_torchrls_vectorised_form():
    torch.manual_seed(0)
    reward, value, next_value = torch.randn(3, 4, 12, 1)
    done = torch.rand(4, 12, 1) < 0.3
    terminated = done & (torch.rand(4, 12, 1) < 0.5)
    discount = 0.5 + torch.rand(4, 12, 1) / 2
    ours = gae(reward, value, next_value, done, terminated, discount, 0.9)
    theirs = vec_generalized_advantage_estimate(
        discount, 0.9, value, next_value, reward, done, terminated
    )
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_gae_refuses_what_would_go_wrong_silently():
    one = row(1.0)
    with pytest.raises(ValueError, match="terminated but not done"):
        gae(one, one, one, row(False), row(True), 0.9, 0.9)
    with pytest.raises(ValueError, match="shapes differ"):
        gae(one, one, one, row(True), row(True), torch.ones(1, 1), 0.9)
    with pytest.raises(ValueError, match=r"lmbda is 1\.5"):
        gae(one, one, one, row(True), row(True), 0.9, 1.5)


def test_gradient_does_not_reach_the_value():
    value = row(1.0).requires_grad_()
    assert not gae(row(1.0), value, row(0.0), row(True), row(True), 0.9, 0.9)[0].requires_grad


def test_return_to_go_stops_at_the_end_of_each_trajectory():
    # discounts .5: [1 + .5*2, 2 | 4 + .5*8, 8]
    out = return_to_go(row(1.0, 2, 4, 8), row(False, True, False, False), 0.5)
    close(out, 2.0, 2.0, 8.0, 8.0)


def test_normalise_over_valid_entries():
    # mean 2, population std 1 -> -1, +1; the invalid 100 (and NaN) take no part.
    valid = row(True, True, False, False)
    close(normalise(row(1.0, 3, 100, torch.nan), valid), -1.0, 1.0, 0.0, 0.0)
    close(normalise(row(0.1, 0.1), row(True, True)), 0.0, 0.0)
    close(normalise(row(7.0), row(True)), 0.0)
    close(normalise(row(7.0), row(False)), 0.0)


def test_reinforce_plus_plus():
    # Returns [.25, .5, 1] and [0, 0]; mean .35, variance (.01+.0225+.4225+2*.1225)/5 = .14.
    reward = torch.tensor([[[0.0], [0.0], [1.0]], [[0.0], [0.0], [50.0]]])
    done = torch.tensor([[[False], [False], [True]], [[False], [True], [True]]])
    valid = torch.tensor([[[True], [True], [True]], [[True], [True], [False]]])
    out = reinforce_plus_plus(reward, done, valid, 0.5)
    close(out, -0.267261, 0.400892, 1.737199, -0.935414, -0.935414, 0.0)
