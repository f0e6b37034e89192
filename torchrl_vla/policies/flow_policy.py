"""A flow policy: any trunk's features, a velocity head on them, paths with exact log-probs.

Same shape as the Gaussian policy: a trunk that may be sharded (``policy.model.model``) and a
replicated actor on its features (``policy.actor``). One pass of the trunk serves all denoising
steps, the state value and the critics.

Legend: ``*`` batch dims, ``K`` denoising steps, ``H`` steps per chunk, ``A`` action dims, ``F``
features; ``H'``, ``A'`` are the head's own chunk length and padded action dims.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Protocol

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional

from torchrl_vla import schema
from torchrl_vla.policies.families import autocast
from torchrl_vla.policies.flow import (
    PATH,
    STEP_LOG_PROBS,
    Field,
    FlowSchedule,
    flow_matching_error,
    path_log_probs,
    sample_path,
    sample_times,
)
from torchrl_vla.policies.heads import QHead
from torchrl_vla.policies.policy import FEATURES, VALUE, Precision, is_random
from torchrl_vla.policies.statistics import ActionSpace

FlowDecode = Literal["ode", "mean", "sample"]
VALUE_OUTPUT = "value"
"""A trunk's name for the state value."""


class VelocityHead(Protocol):
    """What a flow head offers: ``flow.FlowHead``, or an action expert."""

    shape: tuple[int, int]
    """``(H', A')``."""
    real: tuple[int, int]
    """``(H, A)``: what is executed."""

    def context(self, features: Tensor) -> Any:
        """Prepare once per decision what every denoising step reads."""

    def velocity(self, context: Any, x: Tensor, t: Tensor) -> Tensor:
        """Return the velocity at ``x`` ``[*, H', A']`` and ``t`` ``[*]``."""


class FlowDistribution:
    """Chunks that a flow head makes of some features; scores denoising paths, not chunks.

    Args:
        field: velocity field of these features.
        schedule: denoising steps and noise.
        batch: ``*``.
        actor: whose head and action units they are.
        event_dims: what :meth:`log_prob` gives: 2 sums over the chunk, 0 keeps ``[*, H, A]``.
        device: of the samples.
    """

    def __init__(
        self,
        field: Field,
        schedule: FlowSchedule,
        batch: torch.Size,
        actor: FlowActor,
        device: torch.device,
        event_dims: Literal[0, 2] = 2,
    ) -> None:
        self.field, self.schedule, self.actor = field, schedule, actor
        self.event_dims = event_dims
        self.batch, self.device = batch, device

    def _noise(self) -> Tensor:
        return torch.randn(*self.batch, *self.actor.head.shape, device=self.device)

    def path(self) -> tuple[Tensor, Tensor]:
        """Draw a path ``[*, K + 1, H', A']`` and its step log-probs ``[*, K, H, A]``, with grad."""
        return sample_path(self.field, self._noise(), self.schedule, self.actor.head.real)

    def rsample_and_log_prob(
        self, sample_shape: torch.Size | tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor]:
        """Draw chunks ``[*sample_shape, *, H, A]`` and their paths' log-probs; pathwise gradients.

        The steps' noise does not depend on the weights, so the log-prob of an own sample has no
        gradient: an entropy bonus cannot move a flow actor, a critic and a cloning term do.
        """
        draws = [self.path() for _ in range(math.prod(sample_shape))]
        chunks = torch.stack([self.actor.to_chunk(path[..., -1, :, :]) for path, _ in draws])
        scores = torch.stack([score.sum((-3, -2, -1)) for _, score in draws])
        return tuple(x.reshape(*sample_shape, *x.shape[1:]) for x in (chunks, scores))

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw chunks ``[*sample_shape, *, H, A]``, differentiable in the head's weights."""
        return self.rsample_and_log_prob(sample_shape)[0]

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw chunks ``[*sample_shape, *, H, A]`` without gradient."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def ode_path(self, *, centre: bool = False) -> tuple[Tensor, Tensor]:
        """Follow the ODE from a fresh draw, or from 0; returns as :meth:`path` (scores are 0)."""
        noise = torch.zeros_like(self._noise()) if centre else self._noise()
        return sample_path(
            self.field, noise, FlowSchedule(self.schedule.steps), self.actor.head.real
        )

    @property
    def deterministic_sample(self) -> Tensor:
        """Chunk of the ODE from the centre of the noise, ``[*, H, A]``."""
        return self.actor.to_chunk(self.ode_path(centre=True)[0][..., -1, :, :])

    def number_log_prob(self, path: Tensor) -> Tensor:
        """Score a stored path ``[*, K + 1, H', A']``: per number, summed over ``K``, ``[*, H, A]``.

        Float32; this is what the schema's ``log_probs`` holds for a flow policy.
        """
        return path_log_probs(self.field, path, self.schedule, self.actor.head.real).sum(-3)

    def drawn_log_probs(self) -> Tensor:
        """Return what :meth:`number_log_prob` gives for a fresh path, without gradient."""
        with torch.no_grad():
            return self.path()[1].sum(-3)

    def log_prob(self, path: Tensor) -> Tensor:
        """Score a stored path, summed over its steps: ``[*]``, or ``[*, H, A]`` per number."""
        numbers = self.number_log_prob(path)
        return numbers.sum((-2, -1)) if self.event_dims else numbers

    def entropy(self) -> Tensor:
        """Entropy of each number's path given its first state, ``[*, H, A]`` nats, a constant."""
        steps = range(self.schedule.steps)
        each = [
            0.5 * math.log(2 * math.pi * math.e) + math.log(self.schedule.std(k)) for k in steps
        ]
        return torch.full((*self.batch, *self.actor.head.real), sum(each), device=self.device)


class FlowActor(TensorDictModuleBase):
    """A flow head on TensorDicts: ``"features"`` ``[*, F]`` → chunk; TorchRL's SAC calls it.

    Args:
        head: the velocity head.
        schedule: denoising steps and noise.
        space: from the checkpoint's action units to the simulator's; None if they are the same.
        precision: ``"bfloat16"`` runs the head under autocast; states, densities stay float32.
    """

    in_keys = (FEATURES,)
    out_keys = (schema.CHUNK,)
    dist_sample_keys = (schema.CHUNK,)
    log_prob_keys = ("action_log_prob",)

    def __init__(
        self,
        head: nn.Module,
        schedule: FlowSchedule,
        space: ActionSpace | None = None,
        *,
        precision: Precision = "float32",
    ) -> None:
        super().__init__()
        self.head, self.schedule, self.precision = head, schedule, precision
        self.space = ActionSpace(None) if space is None else space

    def to_chunk(self, action: Tensor) -> Tensor:
        """Map a path's end ``[*, H', A']`` to the chunk ``[*, H, A]``.

        A Gaussian chain may leave [-1, 1]; the chunk is then the nearest action of the range. The
        path stays as drawn and is what gets scored, so clamping costs no exactness.
        """
        rows, columns = self.head.real
        return self.space.to_simulator(action[..., :rows, :columns]).clamp(-1.0, 1.0)

    def from_chunk(self, chunk: Tensor) -> Tensor:
        """Map a chunk ``[*, H, A]`` to the head's units, zero-padded to ``[*, H', A']``."""
        rows, columns = (
            full - part for full, part in zip(self.head.shape, self.head.real, strict=True)
        )
        return functional.pad(self.space.from_simulator(chunk), (0, columns, 0, rows))

    def get_dist(
        self, tensordict: TensorDictBase, event_dims: Literal[0, 2] = 2
    ) -> FlowDistribution:
        """Return the distribution of chunks given ``"features"``."""
        features = tensordict.get(FEATURES)
        batch = features.shape[:-1]
        return FlowDistribution(
            self.field(features), self.schedule, batch, self, features.device, event_dims
        )

    def field(self, features: Tensor) -> Field:
        """Return the velocity field of ``features`` ``[*, F]``."""
        with autocast(self.precision, features.device):
            context = self.head.context(features)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            with autocast(self.precision, x.device):
                return self.head.velocity(context, x, t)

        return velocity

    def noiseless(self, tensordict: TensorDictBase) -> Tensor:
        """Return the chunk ``[*, H, A]`` of the ODE from a fresh first state, with gradient."""
        return self.to_chunk(self.get_dist(tensordict).ode_path()[0][..., -1, :, :])

    def cloning_error(self, tensordict: TensorDictBase, chunk: Tensor) -> Tensor:
        """Return the flow-matching error of chunks ``[*, H, A]``, the same shape, float32.

        One time and one noise per chunk, drawn from the global generator; mask and reduce outside.
        """
        action, features = self.from_chunk(chunk), tensordict.get(FEATURES)
        t = sample_times(tuple(action.shape[:-2]), device=action.device)
        rows, columns = self.head.real
        error = flow_matching_error(self.field(features), action, torch.randn_like(action), t)
        return error[..., :rows, :columns]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write a chunk: drawn if exploration is on, else the ODE's from a fresh first state."""
        dist = self.get_dist(tensordict)
        with torch.no_grad():
            path, _ = dist.path() if is_random() else dist.ode_path()
        return tensordict.set(schema.CHUNK, self.to_chunk(path[..., -1, :, :]))


class FlowPolicy(TensorDictModuleBase):
    """Flow policy over the whole chunk.

    Args:
        observer: reads the observation for the trunk (``outputs``: ``"features"``, ``"value"``).
        actor: flow actor on the features.
        eval_decode: with exploration off: ``"ode"`` from a fresh first state (how such policies are
            published), ``"mean"``: the ODE from the centre of the noise, ``"sample"``: the SDE.
        store_log_probs: write path, log-probs and state value with each decision, for on-policy
            objectives; off-policy actors leave it out.

    Raises:
        ValueError: unknown ``eval_decode``, or paths asked for from a schedule without noise.
    """

    action_key: ClassVar[tuple[str, str]] = PATH
    """What :meth:`get_dist` scores."""
    idle: ClassVar[tuple[str, ...]] = ()
    """Parts of the model that this policy never asks for."""

    def __init__(
        self,
        observer: nn.Module,
        actor: FlowActor,
        *,
        eval_decode: FlowDecode = "ode",
        store_log_probs: bool = True,
    ) -> None:
        super().__init__()
        if eval_decode not in ("ode", "mean", "sample"):
            raise ValueError(f"eval_decode is {eval_decode!r}; a flow has 'ode', 'mean', 'sample'")
        if store_log_probs and not actor.schedule.noise_level:
            raise ValueError(
                "noise_level is 0, so paths have no density to store; set noise_level above 0 "
                "(on-policy), or store_log_probs=false (off-policy, cloning)"
            )
        self.model, self.actor = observer, actor
        self.eval_decode, self.stores_log_probs = eval_decode, store_log_probs
        self.in_keys = [schema.IMAGE, schema.STATE, schema.TASK_ID]
        self.out_keys = [schema.CHUNK]
        if store_log_probs:
            self.out_keys += [schema.LOG_PROBS, PATH, STEP_LOG_PROBS, VALUE]

    def features(self, tensordict: TensorDictBase) -> Tensor:
        """Return the trunk's features, ``[*, F]``."""
        return self.model(tensordict, (FEATURES,))[FEATURES]

    def value(self, tensordict: TensorDictBase) -> Tensor:
        """Return the state value, float32 ``[*, 1]``."""
        return self.model(tensordict, (VALUE_OUTPUT,))[VALUE_OUTPUT]

    def score(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write features and state value from one trunk pass; :meth:`get_dist` reads the former."""
        out = self.model(tensordict, (FEATURES, VALUE_OUTPUT))
        return tensordict.set(FEATURES, out[FEATURES]).set(VALUE, out[VALUE_OUTPUT])

    def get_dist(self, tensordict: TensorDictBase) -> FlowDistribution:
        """Return the distribution, log-probs per number; reads what :meth:`score` wrote, if it did.

        :meth:`score` and this share one trunk pass; alone, this runs the trunk.
        """
        if tensordict.get(FEATURES, None) is None:
            features = {FEATURES: self.features(tensordict)}
            tensordict = TensorDict(features, batch_size=tensordict.batch_size)
        return self.actor.get_dist(tensordict, event_dims=0)

    def cloning_error(self, tensordict: TensorDictBase) -> Tensor:
        """Return the flow-matching error of the stored chunks, ``[*, H, A]``."""
        features = tensordict.get(FEATURES, None)
        features = self.features(tensordict) if features is None else features
        given = TensorDict({FEATURES: features}, batch_size=tensordict.batch_size)
        return self.actor.cloning_error(given, tensordict.get(schema.CHUNK))

    def make_critics(self, number: int) -> list[nn.Module]:
        """Return ``number`` fresh Q heads ``(features [*, F], chunk [*, H, A]) -> [*, 1]``."""
        return [QHead(self.model.model.feature_dim, *self.actor.head.real) for _ in range(number)]

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that a weights file holds, by name."""
        return {"model": self.model.model, "flow": self.actor}

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Choose actions: writes the chunk, and with ``store_log_probs`` the other out keys.

        With exploration off and an ODE decode the log-probs are NaN: that path has no density and
        must not be trained on.
        """
        out = self.model(
            tensordict, (FEATURES, VALUE_OUTPUT) if self.stores_log_probs else (FEATURES,)
        )
        given = TensorDict({FEATURES: out[FEATURES]}, batch_size=tensordict.batch_size)
        with torch.no_grad():
            path, scores = self._walk(self.actor.get_dist(given))
        tensordict.set(schema.CHUNK, self.actor.to_chunk(path[..., -1, :, :]))
        if not self.stores_log_probs:
            return tensordict
        tensordict.set(PATH, path).set(STEP_LOG_PROBS, scores)
        return tensordict.set(schema.LOG_PROBS, scores.sum(-3)).set(VALUE, out[VALUE_OUTPUT])

    def _walk(self, dist: FlowDistribution) -> tuple[Tensor, Tensor]:
        if is_random() or self.eval_decode == "sample":
            return dist.path()
        path, scores = dist.ode_path(centre=self.eval_decode == "mean")
        return path, torch.full_like(scores, torch.nan)
