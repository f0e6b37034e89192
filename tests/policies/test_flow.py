"""Flow matching and Flow-SDE: conventions, marginals, densities, masks; and that they learn."""

import math

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from torchrl_vla.policies.flow import (
    FlowHead,
    FlowSchedule,
    flow_matching_error,
    gaussian_log_prob,
    path_log_prob,
    path_log_probs,
    sample_path,
    sample_times,
    step_mean,
)
from torchrl_vla.policies.flow_policy import FlowActor

MU, S = 0.7, 0.3


def gaussian_field(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Exact velocity for actions N(MU, S^2): E[eps | x] - E[a | x]."""
    t = t[..., None, None]
    var = (1 - t) ** 2 * S**2 + t**2
    gap = x - (1 - t) * MU
    return t / var * gap - (MU + (1 - t) * S**2 / var * gap)


def head(seed: int = 0, chunk: int = 2, actions: int = 3) -> FlowHead:
    torch.manual_seed(seed)
    return FlowHead(5, chunk, actions, hidden=16)


def field_of(module: FlowHead, features: torch.Tensor):
    context = module.context(features)
    return lambda x, t: module.velocity(context, x, t)


# --- schedule and single steps ---------------------------------------------------------------


def test_schedule_by_hand():
    schedule = FlowSchedule(4, 0.5)
    # t = 1, 3/4, 1/2, 1/4; the first sigma uses t = 3/4: 0.5 sqrt(3), 0.5 sqrt(3), 0.5, 0.5/sqrt(3)
    assert [schedule.time(k) for k in range(4)] == [1.0, 0.75, 0.5, 0.25]
    wanted = [0.5 * math.sqrt(3)] * 2 + [0.5, 0.5 / math.sqrt(3)]
    assert [schedule.sigma(k) for k in range(4)] == pytest.approx(wanted)
    # the first standard deviation: 0.5 sqrt(1 - 1/4) = 0.4330
    assert schedule.std(0) == pytest.approx(0.4330127)


@pytest.mark.parametrize("steps", [2, 10, 1000])
@pytest.mark.parametrize("level", [0.065, 0.7, 1.0])
def test_every_step_is_below_the_noise_level(steps: int, level: float):
    # clamping t to 1 - 1e-4 would begin with sigma = 100 level (6.5 at level 0.065)
    schedule = FlowSchedule(steps, level)
    stds = [schedule.std(k) for k in range(steps)]
    assert max(stds) == stds[0] == pytest.approx(level * math.sqrt(1 - 1 / steps))
    assert max(stds) < level
    # the weight of the implied noise after the first step: (1 - 1/K)(1 - level^2 / 2), in [1/4, 1)
    x, v = torch.ones(1, 1), torch.zeros(1, 1)
    kept = step_mean(x, v, 1.0, schedule.dt, schedule.sigma(0)).item()
    assert 0.25 <= kept < 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 0.0), "steps is 0"), ((5, -0.1), "noise_level is -0.1"), ((5, 1.5), "noise_level is 1.5"),
     ((1, 0.5), "steps is 1 with noise")],
)  # fmt: skip
def test_a_bad_schedule_is_refused(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        FlowSchedule(*arguments)


def test_step_mean_by_hand():
    # x = 2, v = 1, t = 0.5: eps_hat = 2 + 0.5 = 2.5; sigma^2 / (2 t) = 0.64
    # mean = 2 - 0.25 (1 + 0.64 * 2.5) = 2 - 0.25 * 2.6 = 1.35
    x, v = torch.full((1, 1), 2.0), torch.ones(1, 1)
    assert step_mean(x, v, 0.5, 0.25, 0.8).item() == pytest.approx(1.35)
    # the same by x0 (1 - t') + x1 (t' - sigma^2 dt / (2 t)): x0 = 1.5, x1 = 2.5, t' = 0.25
    by_ends = 1.5 * 0.75 + 2.5 * (0.25 - 0.64 * 0.25)
    assert by_ends == pytest.approx(1.35)


def test_density_by_hand():
    # N(1; 0, 2^2): -1/8 - ln 2 - ln(2 pi)/2 = -0.125 - 0.693147 - 0.918939
    score = gaussian_log_prob(torch.tensor(1.0), torch.tensor(0.0), 2.0)
    assert score.item() == pytest.approx(-1.737086)


# --- sampling --------------------------------------------------------------------------------


def test_no_noise_is_the_ode_exactly():
    module = head()
    features, noise = torch.randn(7, 5), torch.randn(7, 2, 3)
    field = field_of(module, features)
    x, dt = noise, 0.125
    for step in range(8):
        x = x - dt * field(x, torch.full((7,), 1.0 - step * dt))
    state = torch.get_rng_state()
    path, scores = sample_path(field, noise, FlowSchedule(8))
    assert torch.equal(path[:, -1], x)
    assert torch.equal(path[:, 0], noise)
    assert torch.equal(scores, torch.zeros(7, 8, 2, 3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("level", [0.0, 0.3, 0.7, 1.0])
def test_the_sde_keeps_the_marginals(level: float):
    torch.manual_seed(0)
    # 20,000 samples: the standard error of the mean is 0.0021, of the variance 1 %
    noise = torch.randn(20_000, 1, 1)
    path, _ = sample_path(gaussian_field, noise, FlowSchedule(400, level))
    end = path[:, -1].double()
    assert end.mean().item() == pytest.approx(MU, rel=0.02)
    assert end.var().item() == pytest.approx(S**2, rel=0.02)
    # and half-way: x_0.5 = (a + eps) / 2 has mean 0.35 and variance (0.09 + 1) / 4 = 0.2725
    half = path[:, 200].double()
    assert half.mean().item() == pytest.approx(0.35, abs=0.015)
    assert half.var().item() == pytest.approx(0.2725, rel=0.03)


def test_first_step_at_the_references_settings():
    torch.manual_seed(0)
    path, _ = sample_path(gaussian_field, torch.randn(20_000, 1, 1), FlowSchedule(10, 0.7))
    mean = step_mean(path[:, 0], gaussian_field(path[:, 0], torch.ones(20_000)), 1.0, 0.1,
                     FlowSchedule(10, 0.7).sigma(0))  # fmt: skip
    # 0.7 sqrt(0.9) = 0.664, and finite
    assert (path[:, 1] - mean).std().item() == pytest.approx(0.664, rel=0.02)
    assert path.isfinite().all()


def test_padding_follows_the_ode_and_is_not_counted():
    torch.manual_seed(0)
    noise = torch.randn(4, 3, 5)
    # a field that does not couple numbers, so that the padded ones must be the ODE's
    field = gaussian_field
    path, scores = sample_path(field, noise, FlowSchedule(6, 0.7), real=(2, 3))
    ode, _ = sample_path(field, noise, FlowSchedule(6))
    assert scores.shape == (4, 6, 2, 3)
    assert torch.equal(path[:, :, 2:], ode[:, :, 2:])
    assert torch.equal(path[..., 3:], ode[..., 3:])
    assert (path[:, -1, :2, :3] - ode[:, -1, :2, :3]).abs().min() > 0
    again = path_log_probs(field, path, FlowSchedule(6, 0.7), real=(2, 3))
    assert torch.equal(again, scores)


# --- densities -------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (4,), (2, 3)])
def test_stored_paths_score_as_they_were_drawn(batch: tuple[int, ...]):
    module = head()
    features = torch.randn(*batch, 5)
    schedule = FlowSchedule(5, 0.6)
    path, stored = sample_path(field_of(module, features), torch.randn(*batch, 2, 3), schedule)
    assert path.shape == (*batch, 6, 2, 3)
    assert stored.shape == (*batch, 5, 2, 3)
    assert path.dtype == stored.dtype == torch.float32
    with torch.no_grad():
        again = path_log_probs(field_of(module, features), path.detach(), schedule)
    assert (again - stored).abs().max() < 1e-5
    # by hand for the last step: t = 0.2, sigma = 0.6 sqrt(0.2 / 0.8) = 0.3, std = 0.3 sqrt(0.2)
    x = path[..., 4, :, :]
    v = field_of(module, features)(x, torch.full(batch, 0.2))
    mean = x - 0.2 * (v + 0.09 / 0.4 * (x + 0.8 * v))
    by_hand = torch.distributions.Normal(mean, 0.3 * math.sqrt(0.2)).log_prob(path[..., 5, :, :])
    torch.testing.assert_close(stored[..., 4, :, :], by_hand, atol=1e-4, rtol=1e-4)


def test_gradient_of_the_score():
    module = head().double()
    context = torch.randn(3, 16, dtype=torch.float64)
    schedule = FlowSchedule(4, 0.5)

    def field(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return module.velocity(context, x.double(), t.double())

    with torch.no_grad():
        path, _ = sample_path(field, torch.randn(3, 2, 3), schedule)
    weight = module.net[-1].weight

    def score() -> torch.Tensor:
        return path_log_probs(field, path, schedule).double().sum()

    score().backward()
    index, step = (1, 2), 1e-3
    with torch.no_grad():
        weight[index] += step
        high = score()
        weight[index] -= 2 * step
        low = score()
    assert weight.grad[index].item() == pytest.approx(
        ((high - low) / (2 * step)).item(), rel=2e-2, abs=1e-2
    )


def test_sampling_is_differentiable():
    module = head()
    path, _ = sample_path(
        field_of(module, torch.randn(3, 5)), torch.randn(3, 2, 3), FlowSchedule(4, 0.5)
    )
    path[:, -1].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_what_cannot_be_scored():
    module, schedule = head(), FlowSchedule(4, 0.5)
    field = field_of(module, torch.randn(1, 5))
    path = torch.randn(1, 5, 2, 3)
    with pytest.raises(ValueError, match="path has 4 denoising steps, the schedule 6"):
        path_log_probs(field, path, FlowSchedule(6, 0.5))
    with pytest.raises(ValueError, match="an ODE path has no density"):
        path_log_probs(field, path, FlowSchedule(4))
    with pytest.raises(TypeError, match="bfloat16"):
        path_log_probs(field, path.bfloat16(), schedule)


def test_executed_mask_by_hand():
    # K = 2, H = 3, A = 2; every number scores 1, 10 or 100 by its row
    scores = torch.tensor([1.0, 10.0, 100.0])[:, None].expand(2, 3, 2)[None]
    mask = torch.tensor([[True, True, False]])
    # 2 steps x 2 dims x (1 + 10) = 44, never the 100s
    assert path_log_prob(scores, mask).tolist() == [[44.0]]
    assert path_log_prob(scores, ~mask).tolist() == [[400.0]]
    spoiled = torch.where(mask[:, None, :, None], scores, torch.nan)
    assert path_log_prob(spoiled, mask).tolist() == [[44.0]]
    with pytest.raises(TypeError, match="float32"):
        path_log_prob(scores, mask.float())
    with pytest.raises(ValueError, match=r"expected \(1, 3\)"):
        path_log_prob(scores, mask[:, :2])


@pytest.mark.parametrize("mask", [[True, True, True], [True, False, False]])
def test_masked_ratios_average_to_one(mask: list[bool]):
    # importance weights of another field under the one that drew: mean 1, executed part or all
    torch.manual_seed(0)
    old, new = head(0, 3, 1), head(1, 3, 1)
    with torch.no_grad():
        for module, start in ((new, old),):
            for p, q in zip(module.parameters(), start.parameters(), strict=True):
                p.copy_(q + 0.05 * torch.randn_like(q))
        features = torch.randn(1, 5).expand(100_000, 5)
        schedule = FlowSchedule(3, 1.0)
        path, stored = sample_path(field_of(old, features), torch.randn(100_000, 3, 1), schedule)
        scored = path_log_probs(field_of(new, features), path, schedule)
    executed = torch.tensor(mask).expand(100_000, 3)
    weight = path_log_prob(scored - stored, executed).exp()
    error = weight.std().item() / math.sqrt(100_000)
    assert weight.std() > 0.02
    assert weight.mean().item() == pytest.approx(1.0, abs=4 * error)


# --- loss and learning -----------------------------------------------------------------------


def test_flow_matching_error_by_hand():
    # a = 1, eps = 3, t = 0.25: x = 1.5, target eps - a = 2; a field that returns x is off by 0.5
    action, noise = torch.ones(1, 1, 1), torch.full((1, 1, 1), 3.0)
    error = flow_matching_error(lambda x, t: x, action, noise, torch.tensor([0.25]))
    assert error.tolist() == [[[0.25]]]


def test_training_times():
    torch.manual_seed(0)
    t = sample_times((100_000,))
    # 0.001 + 0.999 Beta(1.5, 1), whose mean is 0.6: 0.6004
    assert t.mean().item() == pytest.approx(0.6004, abs=0.003)
    assert t.min() > 0
    assert t.max() <= 1


def test_cloning_lowers_its_loss_and_finds_both_modes():
    torch.manual_seed(0)
    module = FlowHead(1, 1, 1, hidden=64)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    features = torch.zeros(256, 1)
    losses = []
    for _ in range(300):
        # half of the demonstrations go left (-0.6), half right (0.6)
        action = (0.6 * torch.randn(256, 1, 1).sign()) + 0.05 * torch.randn(256, 1, 1)
        noise, t = torch.randn_like(action), sample_times((256,))
        loss = flow_matching_error(field_of(module, features), action, noise, t).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # most of the loss is the spread of eps - a given x_t, which no field can predict
    assert sum(losses[-50:]) / 50 < 0.6 * sum(losses[:5]) / 5
    with torch.no_grad():
        path, _ = sample_path(
            field_of(module, torch.zeros(2000, 1)), torch.randn(2000, 1, 1), FlowSchedule(20)
        )
    end = path[:, -1].flatten()
    near = [((end - mode).abs() < 0.25).float().mean().item() for mode in (-0.6, 0.6)]
    assert min(near) > 0.4
    assert sum(near) > 0.9


def test_group_relative_updates_on_paths_raise_the_reward():
    """One-step bandit: reward is closeness of the chunk to (0.5, -0.5); REINFORCE with a clip."""
    torch.manual_seed(0)
    actor = FlowActor(FlowHead(1, 1, 2, hidden=32), FlowSchedule(4, 0.7))
    nn.init.zeros_(actor.head.net[-1].weight)
    optimizer = torch.optim.Adam(actor.parameters(), lr=3e-3)
    features = TensorDict({"features": torch.ones(64, 1)}, batch_size=64)
    target = torch.tensor([[0.5, -0.5]])

    def reward_of(path: torch.Tensor) -> torch.Tensor:
        return -(actor.to_chunk(path[:, -1]) - target).square().mean((1, 2))

    rewards = []
    for _ in range(60):
        with torch.no_grad():
            path, scores = actor.get_dist(features).path()
        reward = reward_of(path)
        advantage = (reward - reward.mean()) / reward.std()
        for _ in range(2):
            new = actor.get_dist(features).log_prob(path)
            ratio = (new - scores.sum((1, 2, 3))).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        rewards.append(reward.mean().item())
    start, end = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert end > start / 2  # the mean squared distance is more than halved
