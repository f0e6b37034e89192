"""Builds OpenVLA policies: from a published checkpoint, or tiny with random weights.

Shape legend: ``H`` chunk steps, ``A`` action dims, ``V`` bins, ``S`` state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torchrl_vla.policies.action_tokens import TailBins
from torchrl_vla.policies.deferred import is_deferring
from torchrl_vla.policies.families import finish_policy
from torchrl_vla.policies.heads import GaussianHead, chunk_actor
from torchrl_vla.policies.images import ImagePipeline
from torchrl_vla.policies.lora import ADAPTER, LoraSettings
from torchrl_vla.policies.openvla.backbone import Attention
from torchrl_vla.policies.openvla.checkpoint import check_fit
from torchrl_vla.policies.openvla.model import Decoding, OpenVLAModel
from torchrl_vla.policies.openvla.parts import Parts, make_parts
from torchrl_vla.policies.openvla.policy import (
    LM_HEAD,
    ActionReader,
    AutoregressivePolicy,
    RegressionPolicy,
    TailTokenPolicy,
)
from torchrl_vla.policies.openvla.prompts import prompt_table
from torchrl_vla.policies.policy import Decode, GaussianPolicy, Precision
from torchrl_vla.policies.statistics import ActionSpace, LiberoGripper
from torchrl_vla.schema import SuiteMeta

Head = Literal["tokens", "l1", "gaussian"]
MAX_IMAGES = 3
DEFAULT_ATTENTION: dict[Decoding, Attention] = {
    "parallel": "bidirectional",
    "autoregressive": "causal",
}
"""OFT was trained with full attention, OpenVLA with a causal mask; see ``docs/models.md``."""


def make_policy(
    meta: SuiteMeta,
    *,
    decoding: Decoding = "parallel",
    attention: Attention | None = None,
    head: Head = "tokens",
    weights: str | None = None,
    chunk_size: int = 8,
    temperature: float = 1.0,
    eval_decode: Decode = "argmax",
    images: ImagePipeline | None = None,
    cameras: Sequence[str] | None = None,
    gripper: Literal["libero"] | None = None,
    state_token: bool | None = None,
    precision: Precision = "float32",
    store_log_probs: bool = False,
    lora: LoraSettings | None = None,
    **source: Any,
) -> TailTokenPolicy | RegressionPolicy | GaussianPolicy:
    """Build an OpenVLA policy for a suite.

    Args:
        meta: the suite's constants.
        decoding: ``"parallel"`` (OFT) or ``"autoregressive"`` (OpenVLA).
        attention: ``"bidirectional"`` or ``"causal"``; None for the decoding's own.
        head: ``"tokens"``, ``"l1"`` or ``"gaussian"`` (on mean action states, for SAC).
        weights: a safetensors file of an earlier run, loaded on top.
        chunk_size: ``H``.
        temperature: softmax temperature of the token heads.
        eval_decode: see the policy classes.
        images: what happens to images; plain resize if None.
        cameras: names of the suite's cameras that are read, in the model's order; None for all.
        gripper: ``"libero"`` converts the last action from 0..1 to the simulator's signs.
        state_token: whether the state is read; None: where the checkpoint can (tiny: yes).
        precision: of the model's passes, see ``Observer``; weights are float32.
        store_log_probs: see ``GaussianPolicy``; the token policies always store them.
        lora: adapters (the rest is frozen then).
        **source: checkpoint or size, and statistics: see :func:`~.parts.make_parts`.

    Raises:
        ValueError: settings contradict each other, the checkpoint or the suite (both named).
        FileNotFoundError: the checkpoint is not there.
    """
    mode = attention or DEFAULT_ATTENTION.get(decoding, "causal")
    deferred = is_deferring() and weights is None
    parts = make_parts(meta, mode, deferred=deferred, **source)
    model = _model(meta, parts, decoding, head, chunk_size, state_token)
    reader = _reader(meta, parts, model, images or ImagePipeline(), cameras, gripper, precision)
    policy = _policy(reader, head, temperature, eval_decode, store_log_probs)
    policy = finish_policy(policy, source.get("checkpoint"), weights, lora)
    if any(ADAPTER in name and LM_HEAD in name for name, _ in policy.named_parameters()):
        raise ValueError(
            f"lora.targets={lora.targets} match the LM head, of which only the rows of the action "
            "bins are multiplied: train it whole with lora.trained=['*lm_head*']"
        )
    return policy


def _reader(
    meta: SuiteMeta,
    parts: Parts,
    model: OpenVLAModel,
    images: ImagePipeline,
    cameras: Sequence[str] | None,
    gripper: Literal["libero"] | None,
    precision: Precision,
) -> ActionReader:
    if gripper not in (None, "libero"):
        raise ValueError(f"gripper is {gripper!r}; use 'libero', or null for no conversion")
    space = ActionSpace(parts.action, LiberoGripper() if gripper == "libero" else None)
    return ActionReader(
        model,
        prompt_table(meta.instructions, parts.encode, parts.backbone.pad_id, parts.end_id),
        pipeline=images,
        cameras=_camera_rows(meta, cameras),
        bins=TailBins(parts.backbone.window.num_bins, space),
        state_normalizer=parts.state if model.proprio_projector is not None else None,
        vocabulary=parts.vocabulary,
        precision=precision,
        facts=parts.facts,
    )


def _model(
    meta: SuiteMeta,
    parts: Parts,
    decoding: Decoding,
    head: Head,
    chunk_size: int,
    state_token: bool | None,
) -> OpenVLAModel:
    tiny = parts.facts["checkpoint"] is None
    known = "proprio_projector" in parts.extras
    read_state = (tiny or known) if state_token is None else state_token
    for wanted, name in ((read_state, "proprio_projector"), (head == "l1", "action_head")):
        if wanted and not tiny and name not in parts.extras:
            raise ValueError(
                f"{parts.facts['checkpoint']} has no {name}--*.pt, which "
                f"{'state_token=true' if name.startswith('p') else 'head=l1'} needs"
            )
    model = OpenVLAModel(
        parts.backbone,
        state_dim=meta.state_dim,
        action_dim=meta.action_dim,
        chunk_size=chunk_size,
        decoding=decoding,
        read_state=read_state,
        l1_head=head == "l1",
    )
    for name, stored in parts.extras.items():
        part = getattr(model, name)
        if part is not None:
            check_fit(stored, part, f"{name}--*.pt (suite {meta.name!r})")
            part.load_state_dict(stored)
    return model


def _camera_rows(meta: SuiteMeta, names: Sequence[str] | None) -> list[int]:
    chosen = list(meta.cameras if names is None else names)
    unknown = [name for name in chosen if name not in meta.cameras]
    if unknown or not 1 <= len(chosen) <= MAX_IMAGES:
        raise ValueError(
            f"cameras are {chosen}; choose 1..{MAX_IMAGES} of the suite's {list(meta.cameras)}"
        )
    return [meta.cameras.index(name) for name in chosen]


def _policy(
    reader: ActionReader,
    head: Head,
    temperature: float,
    eval_decode: Decode,
    store_log_probs: bool,
) -> TailTokenPolicy | RegressionPolicy | GaussianPolicy:
    model, bins = reader.model, reader.bins
    if head == "tokens":
        kind = TailTokenPolicy if model.decoding == "parallel" else AutoregressivePolicy
        return kind(reader, bins, temperature=temperature, eval_decode=eval_decode)
    if head == "l1":
        return RegressionPolicy(reader, bins.space)
    if head != "gaussian":
        raise ValueError(f"head is {head!r}; use 'tokens', 'l1' or 'gaussian'")
    if model.decoding != "parallel" or bins.space.normalizer or bins.space.gripper:
        raise ValueError(
            "head=gaussian acts in the simulator's units from one parallel pass; use "
            "decoding=parallel, gripper=null and no checkpoint statistics"
        )
    gaussian = chunk_actor(GaussianHead(model.feature_dim, model.chunk_size, model.action_dim))
    policy = GaussianPolicy(
        reader, gaussian, eval_decode=eval_decode, store_log_probs=store_log_probs
    )
    policy.idle = (LM_HEAD,)
    return policy
