"""A squashed Gaussian over an action chunk that scores saturated actions right.

Legend: ``*`` batch dims, ``H`` steps per chunk, ``A`` action dims.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.distributions import TanhTransform
from torchrl.modules import TanhNormal

_NODES, _WEIGHTS = (torch.tensor(x) for x in np.polynomial.hermite.hermgauss(16))
"""Gauss-Hermite quadrature: a mean under a Gaussian as a weighted sum of 16 values."""


class ChunkTanhNormal(TanhNormal):
    """``tanh`` of a Gaussian, scaled to [low, high]; one event is the chunk ``[H, A]``.

    Two routes, because one pre-tanh value cannot be recovered from a rounded action:

    - :meth:`rsample_and_log_prob` (what ``SACLoss`` calls) scores the pre-tanh value that it drew,
      with pathwise gradients.
    - :meth:`log_prob`, and :meth:`sample_and_log_prob` of an actor, score the ACTION AS STORED, so
      that a learner with equal weights finds ratio 1. An action that was rounded to exactly +-1
      stands for all pre-tanh values beyond a limit (9.01 in float32); its density is their
      probability divided by the width of that rounding cell. Values and gradients are finite.

    Args:
        loc: ``[*, H, A]``, pre-tanh; computed in float32 at least.
        scale: ``[*, H, A]``, above 0.
        low: lower end of the action range, a number or ``[A]``.
        high: upper end.
        event_dims: 2 sums the log-prob over the chunk to ``[*]``.

    Differs: TorchRL's TanhNormal clamps to 1 - 1e-6 when it samples and scores, so that it gives a
    saturated action the density of another one (-69 instead of +17 nats at loc 20), and its actor
    and its learner disagree about the same action.
    """

    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        low: Tensor | float = -1.0,
        high: Tensor | float = 1.0,
        event_dims: int = 2,
    ) -> None:
        if loc.dtype in (torch.float16, torch.bfloat16):
            loc, scale = loc.float(), scale.float()
        if isinstance(low, Tensor) or isinstance(high, Tensor) or (low, high) != (-1.0, 1.0):
            super().__init__(loc, scale, low=low, high=high, event_dims=event_dims, safe_tanh=False)
            return
        # What the inherited constructor makes of the default range, without the dozen small
        # operations that it spends on finding out: losses build several of these per update.
        self.low, self.high, self.non_trivial_min, self.non_trivial_max = low, high, False, False
        self.tanh_loc, self.upscale, self.device = False, 5.0, loc.device
        self._event_dims, self._t = event_dims, TanhTransform()
        self.update(loc, scale)

    def saturated(self, value: Tensor) -> Tensor:
        """Which numbers of a chunk lie exactly on an end of the range, ``[*, H, A]`` bool."""
        return (value >= self.high) | (value <= self.low)

    def drawn_log_probs(self) -> Tensor:
        """Return the log-prob of each number of a fresh chunk, ``[*, H, A]``, without gradient."""
        with torch.no_grad():
            return self.number_log_prob(self.sample())

    def number_log_prob(self, value: Tensor) -> Tensor:
        """Log-density of each number of a stored chunk.

        Args:
            value: ``[*, H, A]`` in [low, high].

        Returns:
            ``[*, H, A]``, nats per action unit; the schema's per-number log-prob.

        Raises:
            ValueError: a value is outside [low, high] (it cannot come from this distribution).
            TypeError: the chunk is stored below float32 (its rounding cells are wider).
        """
        if value.dtype in (torch.float16, torch.bfloat16):
            raise TypeError(f"actions have dtype {value.dtype}; store chunks in float32")
        outside = (value < self.low) | (value > self.high)
        if bool(outside.any()):
            raise ValueError(
                f"{int(outside.sum())} actions are outside [low, high], the first is "
                f"{float(value[outside][0])}; the range is part of the policy, so clamp where "
                "the action is made"
            )
        half = (self.high - self.low) / 2
        squashed = (value.to(self.loc.dtype) - (self.high + self.low) / 2) / half
        on_end = self.saturated(value) | (squashed.abs() >= 1)
        # atanh(+-1) is infinite and would make its own gradient NaN even where it is not used.
        preimage = torch.atanh(torch.where(on_end, 0, squashed))
        inside = self._log_normal(preimage) - log_tanh_slope(preimage)
        # Half of the spacing of floats below 1: the closest value to 1 that is not rounded to it.
        cell = torch.finfo(self.loc.dtype).eps / 4
        limit = math.log(2 / cell - 1) / 2
        beyond = (squashed.sign() * self.loc - limit) / self.scale
        at_end = torch.special.log_ndtr(beyond) - math.log(cell)
        return torch.where(on_end, at_end, inside) - torch.as_tensor(half).log()

    def log_prob(self, value: Tensor) -> Tensor:
        """Log-density of a stored chunk, :meth:`number_log_prob` summed over the event, ``[*]``."""
        numbers = self.number_log_prob(value)
        return numbers.flatten(-self._event_dims).sum(-1) if self._event_dims else numbers

    def entropy(self) -> Tensor:
        """Differential entropy, nats: per number ``[*, H, A]``, or of the event.

        The Gaussian's plus the mean log-slope of the squashing, by quadrature (no closed form).
        """
        nodes = _NODES.to(self.loc) * math.sqrt(2)
        slopes = log_tanh_slope(self.loc.unsqueeze(-1) + self.scale.unsqueeze(-1) * nodes)
        squashing = (slopes * _WEIGHTS.to(self.loc)).sum(-1) / math.sqrt(math.pi)
        half = torch.as_tensor((self.high - self.low) / 2).log()
        numbers = math.log(2 * math.pi * math.e) / 2 + self.scale.log() + squashing + half
        return numbers.flatten(-self._event_dims).sum(-1) if self._event_dims else numbers

    def rsample_and_log_prob(
        self, sample_shape: torch.Size | tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Draw a chunk and score the pre-tanh value that it came from, both with gradient.

        The inherited method goes through three transforms; this is the same in fewer operations.

        Args:
            sample_shape: leading sample dims.

        Returns:
            ``(chunk [*, H, A], log-prob [*])``.
        """
        noise = torch.randn(
            (*sample_shape, *self.loc.shape), dtype=self.loc.dtype, device=self.loc.device
        )
        preimage = self.loc + self.scale * noise
        constant = math.log(2 * math.pi) / 2
        numbers = -noise.square() / 2 - self.scale.log() - constant - log_tanh_slope(preimage)
        chunk = preimage.tanh()
        if self.non_trivial_min or self.non_trivial_max:
            half = torch.as_tensor((self.high - self.low) / 2)
            chunk, numbers = chunk * half + (self.high + self.low) / 2, numbers - half.log()
        return chunk, numbers.flatten(-self._event_dims).sum(-1) if self._event_dims else numbers

    def sample_and_log_prob(
        self, sample_shape: torch.Size | tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Draw a chunk and score it as it will be stored.

        Args:
            sample_shape: leading sample dims.

        Returns:
            ``(chunk [*, H, A] without gradient, log-prob [*])``.
        """
        with torch.no_grad():
            chunk = self.rsample(sample_shape)
        return chunk, self.log_prob(chunk)

    def _log_normal(self, preimage: Tensor) -> Tensor:
        z = (preimage - self.loc) / self.scale
        return -z.square() / 2 - self.scale.log() - math.log(2 * math.pi) / 2


def log_tanh_slope(preimage: Tensor) -> Tensor:
    """``log(1 - tanh(u)^2)`` without cancellation, elementwise."""
    return 2 * (math.log(2) - preimage - torch.nn.functional.softplus(-2 * preimage))
