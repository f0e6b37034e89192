"""OpenVLA and OpenVLA-OFT as policies: reader, token and regression policies.

Shape legend: ``*`` batch dims, ``H`` chunk steps, ``A`` action dims, ``V`` bins, ``L`` prompt ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from torchrl_vla import schema
from torchrl_vla.policies.action_tokens import TailBins
from torchrl_vla.policies.families import PromptReader
from torchrl_vla.policies.openvla.model import OpenVLAModel
from torchrl_vla.policies.policy import (
    VALUE,
    Decode,
    TokenPolicy,
    draw_bins,
    is_random,
)
from torchrl_vla.policies.statistics import ActionSpace

LM_HEAD = "backbone.language_model.lm_head"
"""What a head other than the tokens leaves unused, by the start of its name in the model."""


class ActionReader(PromptReader):
    """Reads the observation for an OpenVLA model, and where that is autoregressive, the action.

    Args:
        model: the network and its heads.
        prompts: int64 ``[num_tasks, L]``, see :func:`~.prompts.prompt_table`.
        bins: encodes demonstrated chunks for an autoregressive model.
        **settings: as of :class:`PromptReader`, without the image size, which is the towers'.
    """

    def __init__(
        self, model: OpenVLAModel, prompts: Tensor, *, bins: TailBins, **settings: Any
    ) -> None:
        side = model.backbone.vision_backbone.sizes[0].image_size
        super().__init__(model, prompts, image_size=side, **settings)
        self.bins = bins

    def forward(
        self,
        td: TensorDictBase,
        outputs: tuple[str, ...],
        choose: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Run the model on ``td`` (any batch dims, none included); outputs keep those dims."""
        return super().forward(td, outputs, tokens=self._given_tokens(td, outputs), choose=choose)

    def describe(self) -> dict[str, Any]:
        """Return what a result of this policy depends on besides its weights, as plain values."""
        gripper = None if self.bins.space is None else self.bins.space.gripper
        return {
            "attention": self.model.backbone.attention,
            "decoding": self.model.decoding,
            "state_token": self.model.proprio_projector is not None,
            "gripper": None if gripper is None else type(gripper).__name__,
            **super().describe(),
        }

    def _given_tokens(self, td: TensorDictBase, outputs: tuple[str, ...]) -> Tensor | None:
        if self.model.decoding == "parallel" or "logits" not in outputs or "tokens" in outputs:
            return None
        tokens = td.get(schema.TOKENS, None)
        if tokens is None and td.get(schema.CHUNK, None) is not None:
            tokens = self.bins.encode(td.get(schema.CHUNK))
        return None if tokens is None else tokens.reshape(-1, self.model.num_tokens)


class TailTokenPolicy(TokenPolicy):
    """Token policy whose bins lie at a vocabulary's tail and mean recorded, normalised actions.

    Args:
        observer: reads the observation.
        bins: bins to the simulator's control vectors and back.
        temperature: softmax temperature, above 0.
        eval_decode: see :class:`TokenPolicy`.
    """

    def __init__(
        self, observer: ActionReader, bins: TailBins, *, temperature: float, eval_decode: Decode
    ) -> None:
        model = observer.model
        super().__init__(
            observer,
            chunk_size=model.chunk_size,
            action_dim=model.action_dim,
            num_bins=bins.vocab_size,
            temperature=temperature,
            eval_decode=eval_decode,
        )
        self.action_tokenizer = bins
        self.register_buffer("bin_centres", bins.centres.float(), persistent=False)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Choose actions; see :meth:`TokenPolicy.forward`."""
        tensordict = super().forward(tensordict)
        expected = self.eval_decode == "mean" and not is_random()
        if expected and self.action_tokenizer.space is not None:
            chunk = self.action_tokenizer.to_simulator(tensordict.get(schema.CHUNK))
            tensordict.set(schema.CHUNK, chunk)
        return tensordict

    def normalise(self, chunk: Tensor) -> Tensor:
        """Return control vectors ``[*, H, A]`` in normalised units, those of the bins."""
        space = self.action_tokenizer.space
        return chunk if space is None else space.from_simulator(chunk)


class AutoregressivePolicy(TailTokenPolicy):
    """OpenVLA's own decoding: every token sees the ones before it.

    Acting decodes with a KV cache; ``score`` and ``unscaled_logits`` condition on the stored tokens
    (or, for demonstrations, on the tokens of the chunk) in one causal pass.

    Raises:
        ValueError: ``eval_decode="mean"``: the expected value of a token is no token to go on with.
    """

    def __init__(
        self, observer: ActionReader, bins: TailBins, *, temperature: float, eval_decode: Decode
    ) -> None:
        if eval_decode == "mean":
            raise ValueError(
                "eval_decode=mean needs all bins at once; an autoregressive policy has 'argmax' "
                "and 'sample'"
            )
        super().__init__(observer, bins, temperature=temperature, eval_decode=eval_decode)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Choose actions: writes chunk, tokens, log-probs and the state value."""
        sample = is_random() or self.eval_decode == "sample"

        def choose(logits: Tensor) -> Tensor:
            if sample:
                return draw_bins((logits / self.temperature).softmax(-1))
            return logits.argmax(-1)

        out = self.model(tensordict, ("tokens", "logits", "value"), choose)
        log_probs = (self._split(out["logits"]) / self.temperature).log_softmax(-1)
        tokens = out["tokens"]
        tensordict.set(schema.CHUNK, self.action_tokenizer.decode(tokens))
        tensordict.set(schema.TOKENS, tokens)
        tensordict.set(schema.LOG_PROBS, log_probs.gather(-1, tokens[..., None])[..., 0])
        tensordict.set(VALUE, out["value"])
        return tensordict


class RegressionPolicy(TensorDictModuleBase):
    """OFT's L1 head: one action chunk per state, no distribution.

    It can be cloned and evaluated; there is nothing to explore with.

    Args:
        observer: reads the observation.
        space: normalised numbers to the simulator's control vectors.
    """

    idle: ClassVar[tuple[str, ...]] = (LM_HEAD, "value_head")
    """Parts of the model that this policy never asks for."""

    def __init__(self, observer: ActionReader, space: ActionSpace) -> None:
        super().__init__()
        self.model, self.space = observer, space
        self.eval_decode = "mean"
        self.in_keys = [schema.IMAGE, schema.STATE, schema.TASK_ID]
        self.out_keys = [schema.CHUNK]

    def normalised_chunk(self, tensordict: TensorDictBase) -> Tensor:
        """Return the predicted chunk ``[*, H, A]`` in normalised units, where L1 is taken."""
        return self.model(tensordict, ("actions",))["actions"]

    def normalise(self, chunk: Tensor) -> Tensor:
        """Return demonstrated control vectors ``[*, H, A]`` in normalised units."""
        return self.space.from_simulator(chunk)

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the chunk ``[*, H, A]``, limited to [-1, 1]: the head itself is unbounded."""
        chunk = self.space.to_simulator(self.normalised_chunk(tensordict))
        tensordict.set(schema.CHUNK, chunk.clamp(-1, 1))
        return tensordict

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that a weights file holds, by name."""
        return {"model": self.model.model}
