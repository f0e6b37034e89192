"""What actors and learners see of a VLA, whatever its family.

A policy here is TorchRL's ``VLAWrapperBase`` contract plus what that contract leaves open: the
value read from the same trunk pass, one sampling temperature for rollout and loss, one precision
for rollout, loss and evaluation, and an explicit decode for evaluation. One that on-policy
objectives can train (``stores_log_probs``) stores a float32 log-prob per number with its action,
named by ``action_key``; after ``score`` its ``get_dist`` gives log-probs and entropies per number
``[*, H, A]``. Families (``tiny``, ...) provide the module; these classes own no
architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import nn
from torchrl.data.vla import UniformActionTokenizer
from torchrl.modules.vla import VLAWrapperBase

from torchrl_vla import schema
from torchrl_vla.policies.distributions import ChunkTanhNormal
from torchrl_vla.policies.heads import QHead
from torchrl_vla.policies.instructions import tokenize

Decode = Literal["mean", "argmax", "sample"]
Precision = Literal["float32", "bfloat16"]
LOGITS = ("vla_action", "logits")
VALUE = "state_value"
FEATURES = "features"


def is_random() -> bool:
    """Whether the current exploration setting asks for samples (TorchRL's default does not)."""
    return interaction_type() in (None, InteractionType.RANDOM)


def draw_bins(probs: torch.Tensor) -> torch.Tensor:
    """Draw one bin per distribution by inverting its cumulative sum.

    Needs one uniform number per distribution, where ``torch.multinomial`` draws one per bin.

    Args:
        probs: ``[*, V]``, not negative; need not add up to exactly 1.

    Returns:
        int64 ``[*]`` in 0..V-1; a bin of probability 0 is never drawn.

    Raises:
        FloatingPointError: a probability is not finite (the policy diverged).
    """
    cumulative = probs.cumsum(-1)
    total = cumulative[..., -1:]
    if not bool(total.isfinite().all()):
        raise FloatingPointError(
            f"{int((~total.isfinite()).sum())} of {total.numel()} action distributions are not "
            "finite: the policy diverged; load an older checkpoint and lower the learning rate"
        )
    point = torch.rand_like(total) * total
    # Rounding may lift the product to the total, which lies behind every bin.
    point = torch.minimum(point, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)


class Observer(nn.Module):
    """Reads the schema's observation for a family's module: images, state, instruction ids.

    Args:
        model: the family's module, called as ``model(image, state, words, outputs)``.
        instructions: instruction in words by ``task_id``.
        vocabulary: words the model knows.
        precision: ``"bfloat16"`` runs the module under autocast, wherever the policy acts, learns
            or is evaluated; weights, distributions and log-probs stay float32.

    Raises:
        ValueError: another precision.
    """

    def __init__(
        self,
        model: nn.Module,
        instructions: Sequence[str],
        vocabulary: Sequence[str],
        precision: Precision = "float32",
    ) -> None:
        super().__init__()
        if precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision is {precision!r}; use 'float32' or 'bfloat16'")
        self.model = model
        self.precision = precision
        self.vocabulary = tuple(vocabulary)
        length = max(len(text.split()) for text in instructions)
        table = tokenize(instructions, vocabulary, length)
        self.register_buffer("instruction_table", table, persistent=False)

    def forward(self, td: TensorDictBase, outputs: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Run the model on ``td`` (any batch dims, none included); outputs keep those dims."""
        image, state = td.get(schema.IMAGE), td.get(schema.STATE)
        words = self.instruction_table[td.get(schema.TASK_ID).squeeze(-1)]
        dims = td.batch_dims
        shape = td.batch_size
        with self._autocast(image.device):
            out = self.model(
                image.reshape(-1, *image.shape[dims:]),
                state.reshape(-1, *state.shape[dims:]),
                words.reshape(-1, words.shape[-1]),
                outputs,
            )
        return {key: value.reshape(*shape, *value.shape[1:]) for key, value in out.items()}

    def describe(self) -> dict[str, Any]:
        """Return what a result of this policy depends on besides its weights, as plain values."""
        return {"precision": self.precision, "statistics_sha256": None}

    def _autocast(self, device: torch.device) -> AbstractContextManager[None]:
        if self.precision == "float32":
            return nullcontext()
        return torch.autocast(device.type, dtype=torch.bfloat16)


class TokenPolicy(VLAWrapperBase):
    """Categorical policy over action bins: one distribution per number of the chunk.

    The policy *is* ``softmax(logits / temperature)``, in rollout, in the loss and in evaluation:
    there is no second temperature anywhere.

    Args:
        observer: family module with its instruction table.
        chunk_size: ``H``.
        action_dim: ``A``.
        num_bins: ``V``.
        temperature: softmax temperature, > 0.
        eval_decode: action when exploration is off: ``"mean"`` (expected bin centre), ``"argmax"``
            or ``"sample"``.
    """

    stores_log_probs: ClassVar[bool] = True
    action_key: ClassVar[tuple[str, str]] = schema.TOKENS
    idle: ClassVar[tuple[str, ...]] = ("ground_head",)
    """Parts of the model that this policy never asks for."""

    def __init__(
        self,
        observer: Observer,
        *,
        chunk_size: int,
        action_dim: int,
        num_bins: int,
        temperature: float = 0.6,
        eval_decode: Decode = "mean",
    ) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; it must be above 0")
        if eval_decode not in ("mean", "argmax", "sample"):
            raise ValueError(f"eval_decode is {eval_decode!r}; use 'mean', 'argmax' or 'sample'")
        super().__init__(
            observer,
            action_dim=action_dim,
            chunk_size=chunk_size,
            action_head="tokens",
            vocab_size=num_bins,
            action_tokenizer=UniformActionTokenizer(num_bins, low=-1.0, high=1.0),
            output_mode="both",
            log_probs_mode="token",
            return_vla_action_container=False,
            default_interaction_type=InteractionType.RANDOM,
        )
        self.temperature = temperature
        self.eval_decode = eval_decode
        centres = self.action_tokenizer.decode(torch.arange(num_bins))
        self.register_buffer("bin_centres", centres, persistent=False)
        self.in_keys = [schema.IMAGE, schema.STATE, schema.TASK_ID]
        self.out_keys = [*self.out_keys, VALUE]

    def _action_logits(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return float32 logits ``[*, H, A, V]``, divided by the temperature."""
        return self.unscaled_logits(tensordict) / self.temperature

    def _split(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float().unflatten(-1, (self.action_dim, self.vocab_size))

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Choose actions: writes chunk, tokens, log-probs and the state value into ``tensordict``.

        With exploration off the chunk follows ``eval_decode``; tokens and log-probs are then those
        of the most likely bins and must not be trained on.
        """
        out = self.model(tensordict, ("logits", "value"))
        logits = self._split(out["logits"]) / self.temperature
        log_probs = logits.log_softmax(-1)
        sample = is_random() or self.eval_decode == "sample"
        tokens = draw_bins(log_probs.exp()) if sample else logits.argmax(-1)
        if sample or self.eval_decode == "argmax":
            chunk = self.action_tokenizer.decode(tokens)
        else:
            chunk = log_probs.exp() @ self.bin_centres
        tensordict.set(schema.CHUNK, chunk)
        tensordict.set(schema.TOKENS, tokens)
        tensordict.set(schema.LOG_PROBS, log_probs.gather(-1, tokens[..., None])[..., 0])
        tensordict.set(VALUE, out["value"])
        return tensordict

    def unscaled_logits(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return float32 logits ``[*, H, A, V]`` before the temperature, for cloning."""
        return self._split(self.model(tensordict, ("logits",))["logits"])

    def normalise(self, chunk: torch.Tensor) -> torch.Tensor:
        """Return control vectors ``[*, H, A]`` in the units of :attr:`bin_centres`: the same."""
        return chunk

    def score(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write logits ``[*, H, A, V]`` and value ``[*, 1]`` from one trunk pass.

        ``get_dist`` then reads the stored logits, so a TorchRL loss around this policy and a value
        loss share the pass.
        """
        out = self.model(tensordict, ("logits", "value"))
        tensordict.set(LOGITS, self._split(out["logits"]) / self.temperature)
        tensordict.set(VALUE, out["value"])
        return tensordict

    def value(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return the state value, float32 ``[*, 1]``."""
        return self.model(tensordict, ("value",))["value"]

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that a weights file holds, by name."""
        return {"model": self.model.model}


class GaussianPolicy(TensorDictModuleBase):
    """Tanh-Gaussian policy over the whole chunk, from the trunk's pooled features.

    The head stays outside the sharded trunk, because TorchRL's SAC losses own it functionally.

    Args:
        observer: family module with its instruction table.
        actor: TorchRL ``ProbabilisticActor`` reading ``"features"`` and writing the chunk.
        eval_decode: ``"mean"`` (tanh of the location) or ``"sample"``.
        store_log_probs: store log-probs of the chunk and the state value with every decision, which
            on-policy objectives need and others would pay for.
    """

    action_key: ClassVar[tuple[str, str]] = schema.CHUNK
    idle: ClassVar[tuple[str, ...]] = ("ground_head", "token_head")
    """Parts of the model that this policy never asks for."""

    def __init__(
        self,
        observer: Observer,
        actor: TensorDictModuleBase,
        *,
        eval_decode: Decode = "mean",
        store_log_probs: bool = False,
    ) -> None:
        super().__init__()
        if eval_decode not in ("mean", "sample"):
            raise ValueError(f"eval_decode is {eval_decode!r}; a Gaussian head has 'mean','sample'")
        self.model = observer
        self.actor = actor
        self.eval_decode = eval_decode
        self.stores_log_probs = store_log_probs
        self.in_keys = [schema.IMAGE, schema.STATE, schema.TASK_ID]
        self.out_keys = [schema.CHUNK]
        if store_log_probs:
            self.out_keys += [schema.LOG_PROBS, VALUE]

    def features(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return pooled features, ``[*, F]``."""
        return self.model(tensordict, (FEATURES,))[FEATURES].float()

    def location_and_scale(self, tensordict: TensorDictBase) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the head's ``loc`` and ``scale`` ``[*, H, A]``; reads cached features if given."""
        features = tensordict.get(FEATURES, None)
        if features is None:
            features = self.features(tensordict)
        return self.actor[0].module(features)

    def make_critics(self, number: int) -> list[nn.Module]:
        """Return ``number`` fresh Q heads ``(features [*, F], chunk [*, H, A]) -> [*, 1]``."""
        return [
            QHead(self.model.model.feature_dim, *self.actor[0].module.real) for _ in range(number)
        ]

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that a weights file holds, by name."""
        return {"model": self.model.model, "gaussian": self.actor[0].module}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Choose actions: writes the chunk ``[*, H, A]`` into ``tensordict``.

        With ``store_log_probs`` also the log-prob of each of its numbers, of the chunk as stored,
        and the state value from the same trunk pass. With exploration off the chunk follows
        ``eval_decode`` and must not be trained on.
        """
        sample = is_random() or self.eval_decode == "sample"
        if self.stores_log_probs:
            scored = self.score(tensordict.select(*self.in_keys))
            dist = self.get_dist(scored)
            chunk = dist.sample() if sample else dist.deterministic_sample
            tensordict.set(schema.LOG_PROBS, dist.log_prob(chunk))
            tensordict.set(VALUE, scored.get(VALUE))
        else:
            features = TensorDict(
                {FEATURES: self.features(tensordict)}, batch_size=tensordict.batch_size
            )
            dist = self.actor.get_dist(features)
            chunk = dist.sample() if sample else dist.deterministic_sample
        tensordict.set(schema.CHUNK, chunk)
        return tensordict

    def score(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``loc`` and ``scale`` ``[*, H, A]`` and the value ``[*, 1]``, one trunk pass."""
        out = self.model(tensordict, (FEATURES, "value"))
        loc, scale = self.actor[0].module(out[FEATURES].float())
        return tensordict.set("loc", loc).set("scale", scale).set(VALUE, out["value"])

    def get_dist(self, tensordict: TensorDictBase) -> ChunkTanhNormal:
        """Return the distribution that ``score`` wrote, each number an event of its own."""
        return ChunkTanhNormal(tensordict.get("loc"), tensordict.get("scale"), event_dims=0)

    def value(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return the state value, float32 ``[*, 1]``."""
        return self.model(tensordict, ("value",))["value"]
