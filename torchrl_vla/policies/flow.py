"""Flow matching over action chunks: loss, ODE, and an SDE with the same marginals and a density.

Pure functions of a velocity field ``field(x, t) -> v``; no architecture except :class:`FlowHead`.

Convention (that of transformers' PI0): ``t = 1`` is noise and ``t = 0`` the action,
``x_t = t eps + (1 - t) a``, velocity ``v = eps - a``, and sampling runs from 1 down to 0.

The sampler is a chain of ``K`` Gaussian steps, so its path has an exact density although the final
chunk alone has none. What an on-policy method stores with a decision is therefore the path; the
first state of a path is standard normal under every policy and cancels in ratios.

Legend: ``*`` batch dims, ``K`` denoising steps, ``H`` steps per chunk, ``A`` action dims. A field
may work on more rows and columns than are real (``H'``, ``A'``: a longer chunk, zero-padded dims).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict.utils import NestedKey
from torch import Tensor, nn

from torchrl_vla.policies.heads import mlp

PATH: NestedKey = ("vla_action", "path")
"""Denoising path of a decision, float32 ``[*, K + 1, H', A']``, normalised action units, from noise
to action; written by policies, read by on-policy objectives."""
STEP_LOG_PROBS: NestedKey = ("vla_action", "step_log_probs")
"""Log-prob of each number of each denoising step, float32 ``[*, K, H, A]``, nats; summed over ``K``
they are the schema's per-number log-probs."""

Field = Callable[[Tensor, Tensor], Tensor]
"""Velocity field: ``(x [*, H', A'], t [*] in (0, 1]) -> v [*, H', A']``."""


@dataclass(frozen=True)
class FlowSchedule:
    """Equal steps from t = 1 to 0 and the noise of each.

    ``sigma_t = noise_level sqrt(t / (1 - t))`` is singular at t = 1; the first step uses the next
    grid point instead, so the standard deviation of every step, ``sigma sqrt(1 / K)``, stays below
    ``noise_level`` (the first: ``noise_level sqrt(1 - 1 / K)``, the largest).

    Raises:
        ValueError: a value is outside its range.

    Source: Liu et al. 2025, "Flow-GRPO", arXiv:2505.05470 (its ODE-to-SDE conversion).
    Differs: implementations that clamp t to 1 - 1e-4 begin with ``sigma = 100 noise_level``.
    """

    steps: int = 10
    """``K``, at least 1; at least 2 with noise."""
    noise_level: float = 0.0
    """In [0, 1]; 0 is the ODE. Above 1 the first step would be mostly fresh noise."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"flow steps is {self.steps}; denoising takes at least 1")
        if not 0.0 <= self.noise_level <= 1.0:
            raise ValueError(f"flow noise_level is {self.noise_level}; it must lie in [0, 1]")
        if self.noise_level and self.steps < 2:
            raise ValueError("flow steps is 1 with noise: use at least 2 steps, or noise_level 0")

    @property
    def dt(self) -> float:
        """Length of a step in t."""
        return 1.0 / self.steps

    def time(self, step: int) -> float:
        """Return t at the start of ``step`` (0..K-1), in (0, 1]."""
        return 1.0 - step * self.dt

    def sigma(self, step: int) -> float:
        """Return the diffusion coefficient of ``step``, finite; 0 is deterministic."""
        t = self.time(max(step, 1))
        return self.noise_level * math.sqrt(t / (1.0 - t)) if self.noise_level else 0.0

    def std(self, step: int) -> float:
        """Return the standard deviation that ``step`` adds, below ``noise_level``."""
        return self.sigma(step) * math.sqrt(self.dt)


def sample_times(
    shape: tuple[int, ...],
    *,
    alpha: float = 1.5,
    beta: float = 1.0,
    scale: float = 0.999,
    offset: float = 0.001,
    device: torch.device | None = None,
) -> Tensor:
    """Draw training times ``offset + scale Beta(alpha, beta)``, float32 ``shape`` in (0, 1].

    Source: Black et al. 2024, "pi0", arXiv:2410.24164, appendix B (more weight on noisy times).
    """
    first, second = (torch.tensor(value, device=device) for value in (alpha, beta))
    draws = torch.distributions.Beta(first, second).sample(shape)
    return offset + scale * draws


def flow_matching_error(field: Field, action: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """Elementwise squared error of the velocity at ``x_t``; mask and reduce outside.

    Args:
        field: the velocity field that is trained.
        action: ``[*, H', A']``, normalised units.
        noise: ``[*, H', A']``, standard normal.
        t: ``[*]`` in (0, 1], see :func:`sample_times`.

    Returns:
        ``[*, H', A']`` float32.

    Source: Lipman et al. 2023, arXiv:2210.02747, eq. 23; PI0's sign of time.
    """
    time = t[..., None, None]
    x = time * noise + (1.0 - time) * action
    return (field(x, t).float() - (noise - action)).square()


def step_mean(
    x: Tensor, velocity: Tensor, t: float, dt: float, sigma: Tensor | float = 0.0
) -> Tensor:
    """Mean of the state at ``t - dt`` given ``x`` at ``t``; with ``sigma`` 0 the Euler step.

    ``x - dt (v + sigma^2 / (2 t) eps_hat)`` with ``eps_hat = x + (1 - t) v``, the noise that ``v``
    implies; ``-eps_hat / t`` is the score, so the drift undoes what the added noise spreads.

    Args:
        x: ``[*, H', A']``.
        velocity: ``[*, H', A']`` at ``(x, t)``.
        t: in (0, 1].
        dt: above 0.
        sigma: one number, or per number ``[H', A']`` (0 where the chain is deterministic).

    Returns:
        ``[*, H', A']``.

    Source: Song et al. 2021, arXiv:2011.13456, eq. 6; Liu et al. 2025, arXiv:2505.05470.
    """
    noise = x + (1.0 - t) * velocity
    return x - dt * (velocity + sigma * sigma / (2.0 * t) * noise)


def gaussian_log_prob(value: Tensor, mean: Tensor, std: float) -> Tensor:
    """Elementwise log-density of ``value`` under N(mean, std^2), float32, nats."""
    z = (value.float() - mean.float()) / std
    return -0.5 * z.square() - math.log(std) - 0.5 * math.log(2.0 * math.pi)


def sample_path(
    field: Field, noise: Tensor, schedule: FlowSchedule, real: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor]:
    """Run the chain from ``noise`` to an action; differentiable through every step.

    Only the real numbers get noise; padded rows and columns follow the ODE, which keeps the
    marginals (the score correction may differ per number) and adds nothing uncounted to the path.

    Args:
        field: velocity field.
        noise: ``[*, H', A']`` standard normal, the first state.
        schedule: steps and noise; with ``noise_level`` 0 no random number is drawn.
        real: ``(H, A)``; ``None``: all of ``(H', A')``.

    Returns:
        ``(path [*, K + 1, H', A'], step log-probs [*, K, H, A])``, float32; without noise there is
        no density and the second is 0.
    """
    return _chain(field, schedule, real, [noise.float()], None)


def path_log_probs(
    field: Field, path: Tensor, schedule: FlowSchedule, real: tuple[int, int] | None = None
) -> Tensor:
    """Score a stored path under ``field``; with the weights that drew it, equal to what was stored.

    The field is asked at the same states one step at a time, as in sampling, so that actor and
    learner agree to the last bits.

    Args:
        field: velocity field of the policy that is trained.
        path: ``[*, K + 1, H', A']`` float32 as stored.
        schedule: the one that drew it.
        real: as in :func:`sample_path`.

    Returns:
        ``[*, K, H, A]`` float32, differentiable in the field's parameters.

    Raises:
        ValueError: the path has another number of steps, or the schedule has no noise.
        TypeError: the path is stored below float32.
    """
    if path.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"path has dtype {path.dtype}; store denoising paths in float32")
    if path.shape[-3] != schedule.steps + 1:
        raise ValueError(
            f"path has {path.shape[-3] - 1} denoising steps, the schedule {schedule.steps}; score "
            "a path with the schedule that drew it"
        )
    if not schedule.noise_level:
        raise ValueError("noise_level is 0: an ODE path has no density; set noise_level above 0")
    states = [state.float() for state in path.unbind(-3)]
    return _chain(field, schedule, real, states[:1], states[1:])[1]


def _chain(
    field: Field,
    schedule: FlowSchedule,
    real: tuple[int, int] | None,
    states: list[Tensor],
    given: list[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Walk the chain, drawing each next state or taking it from ``given``; score the real part."""
    x = states[0]
    rows, columns = real or (x.shape[-2], x.shape[-1])
    block = torch.zeros(x.shape[-2:], device=x.device)
    block[:rows, :columns] = 1.0
    scores = []
    for step in range(schedule.steps):
        t, std = schedule.time(step), schedule.std(step)
        velocity = field(x, torch.full(x.shape[:-2], t, device=x.device)).float()
        mean = step_mean(x, velocity, t, schedule.dt, schedule.sigma(step) * block)
        if given is not None:
            x = given[step]
        elif std:
            x = mean + std * block * torch.randn_like(mean)
        else:
            x = mean
        states.append(x)
        part = mean[..., :rows, :columns]
        score = gaussian_log_prob(x[..., :rows, :columns], part, std) if std else 0.0 * part
        scores.append(score)
    return torch.stack(states, -3), torch.stack(scores, -3)


def path_log_prob(step_log_probs: Tensor, executed_mask: Tensor) -> Tensor:
    """Sum a path's log-prob over denoising steps and executed numbers.

    Every row of a path reads all rows of the state before it, so rows that were never executed did
    influence those that were. Leaving their terms out (at every denoising step) makes the ratio of
    two such sums the exact importance weight of the policy that moves the executed rows by the new
    means and the others by the behaviour's; its expectation is 1. What the gradient misses is the
    effect of never-executed rows on executed ones.

    Args:
        step_log_probs: ``[*, K, H, A]``.
        executed_mask: ``[*, H]`` bool.

    Returns:
        ``[*, 1]`` float32, nats.

    Raises:
        TypeError: the mask is not bool.
        ValueError: shapes do not belong together.
    """
    if executed_mask.dtype != torch.bool:
        raise TypeError(f"executed_mask has dtype {executed_mask.dtype}, not torch.bool")
    shape = (*step_log_probs.shape[:-3], step_log_probs.shape[-2])
    if executed_mask.shape != shape:
        raise ValueError(
            f"executed_mask has shape {tuple(executed_mask.shape)}, expected {shape} for step "
            f"log-probs {tuple(step_log_probs.shape)}"
        )
    mask = executed_mask[..., None, :, None]
    return torch.where(mask, step_log_probs, 0).sum((-3, -2, -1)).unsqueeze(-1)


class FlowHead(nn.Module):
    """Velocity of an action chunk from pooled features: the flow head of any trunk.

    Features, noisy chunk and time are projected apart and added, so that a few numbers of the chunk
    weigh as much as hundreds of features.

    Args:
        feature_dim: ``F``, width of the features.
        chunk_size: ``H``.
        action_dim: ``A``.
        hidden: width of the hidden layers.
        frequencies: sine and cosine pairs of the time embedding.
    """

    def __init__(
        self,
        feature_dim: int,
        chunk_size: int,
        action_dim: int,
        hidden: int = 256,
        frequencies: int = 8,
    ) -> None:
        super().__init__()
        self.shape = self.real = (chunk_size, action_dim)
        self.condition = nn.Linear(feature_dim, hidden)
        numbers = chunk_size * action_dim
        self.chunk_in = nn.Linear(numbers, hidden)
        self.time_in = nn.Linear(2 * frequencies, hidden)
        self.net = mlp(hidden, hidden, numbers)
        rates = math.pi * 2.0 ** torch.arange(frequencies)
        self.register_buffer("rates", rates, persistent=False)

    def context(self, features: Tensor) -> Tensor:
        """Map features ``[*, F]`` to what every denoising step reads, ``[*, hidden]``."""
        return self.condition(features)

    def velocity(self, context: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity ``[*, H, A]`` at state ``x`` ``[*, H, A]`` and time ``t`` ``[*]``."""
        phase = t[..., None] * self.rates.to(t.dtype)
        time = self.time_in(torch.cat([phase.sin(), phase.cos()], dim=-1))
        inputs = context + self.chunk_in(x.flatten(-2)) + time
        return self.net(nn.functional.silu(inputs)).unflatten(-1, self.shape)
