"""What TorchRL's TanhNormal does at the ends of the range, and what ours does (B16, B17)."""

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import NormalParamExtractor, TensorDictModule, TensorDictSequential
from torchrl.data import Bounded
from torchrl.modules import ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import SACLoss

from torchrl_vla.policies.distributions import ChunkTanhNormal

BOTH = pytest.mark.parametrize("cls", [TanhNormal, ChunkTanhNormal])


def chunk(value, shape=(1, 1, 1)):
    return torch.full(shape, float(value))


@BOTH
def test_scale_of_the_range(cls):
    # log N(atanh .5) - log(1 - .25) = -1.069812 + .287682 = -.782130; half the density on a range
    # twice as wide: - ln 2 = -1.475272; 7 dims differ by 7 ln 2 = 4.852030.
    narrow = cls(chunk(0), chunk(1), event_dims=2).log_prob(chunk(0.5))
    wide = cls(chunk(0), chunk(1), low=-2.0, high=2.0, event_dims=2).log_prob(chunk(1.0))
    assert narrow.item() == pytest.approx(-0.782125, abs=1e-5)
    assert wide.item() == pytest.approx(-1.475272, abs=1e-5)
    shape = (1, 1, 7)
    args = chunk(0, shape), chunk(1, shape)
    seven = cls(*args, event_dims=2).log_prob(chunk(0.5, shape))
    seven_wide = cls(*args, low=-2.0, high=2.0, event_dims=2).log_prob(chunk(1.0, shape))
    assert (seven - seven_wide).item() == pytest.approx(4.852030, abs=1e-5)


@BOTH
def test_two_event_dims_sum_over_the_chunk(cls):
    dist = cls(chunk(0, (4, 8, 7)), chunk(1, (4, 8, 7)), event_dims=2)
    log_prob = dist.log_prob(chunk(0.5, (4, 8, 7)))
    assert log_prob.shape == (4,)
    assert log_prob.tolist() == pytest.approx([56 * -0.782125] * 4, abs=1e-3)


def test_torchrl_scores_a_saturated_action_as_another_one():
    # It clamps to 1 - 1e-6 (pre-tanh 7.2477): log N(7.2477; 20, 1) - log(1 - y^2) = -69.12, where
    # the pre-tanh value 20 has +37.694767, and -1.0 is clamped likewise.
    dist = TanhNormal(chunk(20), chunk(1), event_dims=2)
    assert dist.log_prob(chunk(1)).item() == pytest.approx(-69.12, abs=0.01)
    action, kept = dist.rsample_and_log_prob()
    assert kept.item() > 30
    # So an actor that stores the kept value and a learner that rescores disagree by e^100.
    assert dist.log_prob(action).item() < -60


def parameters(loc, std):
    return chunk(loc).requires_grad_(), chunk(std).requires_grad_()


def test_kept_pre_tanh_value():
    # u = 20 + z: log N(z) + 2u - 2 ln 2 (tanh' = 4 e^-2u): 37.694767 at z = 0.
    loc, std = parameters(20, 1)
    torch.manual_seed(0)
    z = torch.randn(1, 1, 1).item()
    torch.manual_seed(0)
    action, log_prob = ChunkTanhNormal(loc, std).rsample_and_log_prob()
    assert log_prob.item() == pytest.approx(37.694767 - z * z / 2 + 2 * z, abs=1e-3)
    assert action.item() == 1
    (log_prob.sum() + action.sum()).backward()
    # d/dloc = 2; d/dstd = 2 z - 1.
    assert loc.grad.item() == pytest.approx(2.0, abs=1e-4)
    assert std.grad.item() == pytest.approx(2 * z - 1, abs=1e-4)


@pytest.mark.parametrize("loc", [20.0, 0.0, -20.0, 9.0])
@pytest.mark.parametrize("std", [1.0, 0.1])
@pytest.mark.parametrize("action", [1.0, -1.0, 1 - 2**-24, -1 + 2**-24, 0.999, 0.0])
def test_stored_action_has_finite_value_and_gradients(loc, std, action):
    mean, scale = parameters(loc, std)
    value = chunk(action).requires_grad_()
    log_prob = ChunkTanhNormal(mean, scale).log_prob(value)
    log_prob.sum().backward()
    for x in (log_prob, mean.grad, scale.grad, value.grad):
        assert bool(x.isfinite().all())


def test_saturated_action_has_the_density_of_its_rounding_cell():
    # All pre-tanh values beyond 9.01 are stored as 1.0; at loc 20 that is certain, and the cell is
    # 2^-25 wide: log density = 25 ln 2 = 17.328680. At -1.0 the probability is that of a normal
    # beyond 29.01 sigma: ln Phi(-29.01) = -425.10, plus 17.33 = -407.78.
    dist = ChunkTanhNormal(chunk(20), chunk(1))
    assert dist.log_prob(chunk(1)).item() == pytest.approx(17.328680, abs=1e-4)
    assert dist.log_prob(chunk(-1)).item() == pytest.approx(-407.78, abs=0.01)
    # On [-2, 2] the cell is twice as wide: 24 ln 2.
    wide = ChunkTanhNormal(chunk(20), chunk(1), low=-2.0, high=2.0)
    assert wide.log_prob(chunk(2)).item() == pytest.approx(16.635532, abs=1e-4)


def test_whole_probability_is_one():
    # The density between the cells, integrated over the pre-tanh value, plus both cells. For
    # loc 8.5, std 1 about 30 % of the probability is rounded to 1.0.
    loc, std = chunk(8.5, (200_001, 1, 1)), chunk(1, (200_001, 1, 1))
    limit = 9.010913
    u = torch.linspace(-limit, limit, 200_001, dtype=torch.float64).view(-1, 1, 1)
    dist = ChunkTanhNormal(loc.double(), std.double())
    slope = 4 * torch.exp(-2 * u.abs()) / (1 + torch.exp(-2 * u.abs())) ** 2
    inside = torch.trapezoid((dist.log_prob(torch.tanh(u)).exp() * slope.flatten()), u.flatten())
    ends = ChunkTanhNormal(loc[:1], std[:1])
    cells = sum(ends.log_prob(chunk(end)).exp().item() * 2**-25 for end in (1, -1))
    assert cells == pytest.approx(0.3047, abs=1e-3)
    assert inside.item() + cells == pytest.approx(1.0, abs=1e-4)


def test_actor_and_learner_agree_on_every_stored_chunk():
    torch.manual_seed(0)
    loc, std = torch.randn(64, 8, 7) * 8, torch.rand(64, 8, 7) + 0.1
    dist = ChunkTanhNormal(loc, std)
    action, stored = dist.sample_and_log_prob()
    assert bool(dist.saturated(action).any())
    assert torch.equal(ChunkTanhNormal(loc, std).log_prob(action), stored)
    assert torch.allclose(dist.number_log_prob(action).sum((-2, -1)), stored)
    assert dist.number_log_prob(action).shape == (64, 8, 7)


def test_impossible_and_half_precision_actions_are_refused():
    dist = ChunkTanhNormal(chunk(0), chunk(1))
    with pytest.raises(ValueError, match=r"1 actions are outside .* 1\.5"):
        dist.log_prob(chunk(1.5))
    with pytest.raises(TypeError, match="bfloat16"):
        dist.log_prob(chunk(0.5).bfloat16())


def sac(dist, horizon=8, dims=7):
    shape = (horizon, dims)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 2 * horizon * dims),
        torch.nn.Unflatten(-1, (horizon, 2 * dims)),
        NormalParamExtractor(),
    )
    actor = ProbabilisticActor(
        TensorDictModule(net, in_keys=["state"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        out_keys=["action"],
        spec=Bounded(-1, 1, shape),
        distribution_class=dist,
        distribution_kwargs={"event_dims": 2},
        return_log_prob=True,
    )

    class Q(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3 + horizon * dims, 1)

        def forward(self, state, action):
            return self.net(torch.cat([state, action.flatten(-2)], -1))

    critics = [ValueOperator(Q(), in_keys=["state", "action"]) for _ in range(2)]
    return actor, SACLoss(actor, critics, action_spec=Bounded(-1, 1, shape))


@BOTH
@pytest.mark.filterwarnings("ignore:No target network updater")
@pytest.mark.parametrize("batch", [4, 8])
def test_sac_loss_on_an_action_chunk(cls, batch):
    # B17: log-prob [B] (sum over 56), target entropy -56, for B different from and equal to H.
    torch.manual_seed(0)
    actor, loss = sac(cls)
    td = TensorDict(
        {
            "state": torch.randn(batch, 3),
            "action": torch.rand(batch, 8, 7) * 2 - 1,
            "next": {
                "state": torch.randn(batch, 3),
                "reward": torch.randn(batch, 1),
                "done": torch.zeros(batch, 1, dtype=torch.bool),
                "terminated": torch.zeros(batch, 1, dtype=torch.bool),
            },
        },
        [batch],
    )
    out = actor(td.select("state"))
    assert isinstance(actor, TensorDictSequential)
    assert out["action_log_prob"].shape == (batch,)
    assert float(loss.target_entropy) == -56
    losses = loss(td)
    total = losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]
    total.backward()
    grads = [p.grad for p in loss.parameters() if p.grad is not None]
    assert grads
    assert all(bool(g.isfinite().all()) for g in grads)


@pytest.mark.parametrize(("loc", "scale"), [(0.0, 0.02), (0.3, 0.2), (-1.0, 0.1), (2.0, 0.2)])
def test_the_entropy_is_the_mean_surprise_of_its_own_samples(loc: float, scale: float):
    dist = ChunkTanhNormal(chunk(loc), chunk(scale), event_dims=0)
    torch.manual_seed(0)
    surprise = -dist.log_prob(dist.sample((100_000,)))
    # standard error 0.72 / sqrt(100,000) = 0.002
    assert dist.entropy().item() == pytest.approx(surprise.mean().item(), abs=0.01)
    wide = ChunkTanhNormal(chunk(loc), chunk(scale), low=-2.0, high=2.0, event_dims=0)
    assert (wide.entropy() - dist.entropy()).item() == pytest.approx(0.693147, abs=1e-5)
    whole = ChunkTanhNormal(chunk(loc, (1, 2, 3)), chunk(scale, (1, 2, 3)))
    assert whole.entropy().item() == pytest.approx(6 * dist.entropy().item(), rel=1e-5)
