"""Conservative Q-learning over whole action chunks: SAC plus a penalty on unseen chunks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from torchrl_vla.objectives.critics import CHUNK, FEATURES, NEXT_FEATURES, Ensemble
from torchrl_vla.objectives.off_policy import cql_penalty
from torchrl_vla.objectives.soft_actor_critic import SoftActorCritic


class ConservativeSoftActorCritic(SoftActorCritic):
    """CQL(H) (Kumar et al. 2020, arXiv:2006.04779, eq. 4 and appendix F) on our SAC.

    Differs: TorchRL's ``CQLLoss`` samples per number of a flat action and has one discount per
    decision; the Bellman part here stays ``SACLoss`` (discount ``gamma ** num_executed``, filled
    chunks, reductions), and only the penalty is added. No Lagrange multiplier.

    Args:
        args: as :class:`~torchrl_vla.objectives.soft_actor_critic.SoftActorCritic`.
        conservative_weight: weight of the penalty, > 0 (0 would be ``SoftActorCritic``).
        conservative_samples: chunks per state from each of three proposals: uniform, the policy
            there, the policy at the next state.
        conservative_temperature: of the soft maximum, > 0.
        density_weights: weigh a sample by its proposal's density, so that the soft maximum is over
            all chunks. ``False`` takes the samples as they are: in ``H × A`` dimensions a density
            differs so much between proposals that the policy's samples would hardly count.
        settings: as :class:`~torchrl_vla.objectives.soft_actor_critic.SoftActorCritic`.

    Raises:
        ValueError: a setting is out of its range.
    """

    def __init__(
        self,
        *args: Any,
        conservative_weight: float,
        conservative_samples: int = 1,
        conservative_temperature: float = 1.0,
        density_weights: bool = True,
        **settings: Any,
    ) -> None:
        if conservative_weight <= 0:
            raise ValueError(
                f"conservative_weight is {conservative_weight}; it must be above 0 (use algo=sac "
                "for none)"
            )
        if conservative_samples < 1:
            raise ValueError(f"conservative_samples is {conservative_samples}; the least is 1")
        if conservative_temperature <= 0:
            raise ValueError(f"conservative_temperature is {conservative_temperature}; use > 0")
        super().__init__(*args, **settings)
        self.conservative_weight, self.samples = conservative_weight, conservative_samples
        self.temperature, self.density_weights = conservative_temperature, density_weights

    def _critic_terms(
        self, rows: TensorDict, batch: TensorDictBase, totals: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        out = super()._critic_terms(rows, batch, totals)
        chunks, log_density = self.proposals(rows)
        # [S, E, B, 1]: the members are first in what the ensemble returns.
        q = Ensemble.values(self.ensemble.online, rows[FEATURES], chunks).transpose(0, 1)
        density = log_density[:, None, :, None].expand_as(q) if self.density_weights else None
        penalty = cql_penalty(self.loss.online, q, density, self.temperature)
        out["loss_conservative"] = self.conservative_weight * penalty.sum() / totals["rows"]
        return out

    @torch.no_grad()
    def proposals(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Draw chunks to be held down.

        Args:
            rows: features ``[B, F]`` here and of the next observation; the filled chunk.

        Returns:
            Chunks ``[3 S, B, H, A]`` (uniform, policy, policy of the next state) and the
            log-density of each under the proposal that drew it, ``[3 S, B]``, nats.
        """
        shape = (self.samples, *rows[CHUNK].shape)
        uniform = 2 * torch.rand(shape, device=rows[CHUNK].device) - 1
        numbers = math.prod(shape[2:])
        chunks = [uniform]
        densities = [uniform.new_full(shape[:2], -numbers * math.log(2))]
        for features in (rows[FEATURES], rows[NEXT_FEATURES]):
            at = TensorDict({FEATURES: features}, batch_size=rows.batch_size)
            drawn = self.actor.get_dist(at).rsample_and_log_prob((self.samples,))
            chunks.append(drawn[0])
            densities.append(drawn[1])
        return torch.cat(chunks), torch.cat(densities)
