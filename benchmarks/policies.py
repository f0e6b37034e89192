"""Time of a decision and of an update: tiny members of the large families against their backbone.

The bare side calls the same modules with the same weights in the shortest way that works for
equal prompts: no TensorDict, no padding, no checks. Before anything is timed, both sides are shown
to give the same numbers.

    OMP_NUM_THREADS=1 python benchmarks/policies.py --out benchmarks/results/policies.json
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
from side_by_side import Ratio, Sample, command_line, machine, report, take_turns
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from torchrl_vla import schema, topology
from torchrl_vla.envs.tabletop import TabletopSuite
from torchrl_vla.learner import Learner, ParameterGroup
from torchrl_vla.objectives.imitation import token_cross_entropy
from torchrl_vla.policies.openvla import make_policy
from torchrl_vla.policies.openvla.model import OpenVLAModel
from torchrl_vla.policies.policy import VALUE, draw_bins

UNIT = "ms"
RATIOS = tuple(
    Ratio(f"{name}: ours / bare", f"{name} ours", [f"{name} bare"], UNIT, 1.10, at_least=False)
    for name in ("OFT decision", "OFT update", "OpenVLA decision", "OpenVLA update")
)
LR = 1e-5
MAX_NORM = 1.0


def observations(policy: nn.Module, rows: int) -> TensorDict:
    """Return ``rows`` random observations of one instruction, with tokens to score."""
    meta = TabletopSuite().meta
    generator = torch.Generator().manual_seed(0)
    size, model = meta.image_size, policy.model.model
    td = TensorDict(batch_size=[rows])
    image = (rows, len(meta.cameras), 3, size, size)
    td[schema.IMAGE] = torch.randint(0, 256, image, generator=generator, dtype=torch.uint8)
    td[schema.STATE] = torch.randn(rows, meta.state_dim, generator=generator)
    td[schema.TASK_ID] = torch.zeros(rows, 1, dtype=torch.int64)
    chunk = (rows, model.chunk_size, model.action_dim)
    td[schema.TOKENS] = torch.randint(0, policy.vocab_size, chunk, generator=generator)
    return td


def prompt_of(policy: nn.Module, td: TensorDictBase) -> Tensor:
    """Return the one prompt of ``td`` without pads, ``[B, L]``."""
    words = policy.model.prompt_table[td[schema.TASK_ID][0, 0]]
    words = words[words != policy.model.model.backbone.pad_id]
    return words.expand(len(td), -1)


class Bare:
    """The backbone by hand: one prompt length, one image pipeline that does nothing.

    Args:
        model: shared with, or a copy of, the policy's.
        words: ``[B, L]`` without pads.
        temperature: of the policy.
    """

    def __init__(self, model: OpenVLAModel, words: Tensor, temperature: float) -> None:
        self.model, self.words, self.temperature = model, words, temperature
        self.llama = model.backbone.language_model.model
        self.rows = model.backbone.window.columns

    def prefix(self, td: TensorDictBase) -> Tensor:
        """Return the embeddings up to the last prompt token."""
        backbone = self.model.backbone
        pixels = backbone.vision_backbone.normalise(td[schema.IMAGE])
        patches = backbone.projector(backbone.vision_backbone(pixels))
        words = self.llama.embed_tokens(self.words)
        state = self.model.proprio_projector
        extra = [] if state is None else [state(td[schema.STATE])]
        return torch.cat([words[:, :1], patches, *extra, words[:, 1:]], dim=1)

    def head(self, hidden: Tensor) -> Tensor:
        """Return window logits."""
        weight = self.model.backbone.language_model.lm_head.weight
        return functional.linear(hidden, weight[self.rows])

    def parallel(self, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, T, V]`` and value of OFT's single pass."""
        prefix, number = self.prefix(td), self.model.num_tokens
        stop = self.llama.embed_tokens.weight[self.model.backbone.stop_id]
        tail = torch.cat(
            [stop.new_zeros(len(td), number, len(stop)), stop.expand(len(td), 1, -1)], 1
        )
        embeds = torch.cat([prefix, tail], dim=1)
        mask = torch.ones(len(td), 1, 1, embeds.shape[1], dtype=torch.bool)
        out = self.llama(inputs_embeds=embeds, attention_mask=mask, use_cache=False)
        hidden = out.last_hidden_state[:, -2 - number : -2]
        return self.head(hidden), self.model.value_head(hidden[:, 0])

    def forced(self, td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return logits ``[B, T, V]`` and value of one causal pass over given tokens."""
        ids = td[schema.TOKENS].flatten(1) + self.model.backbone.window.first
        embeds = torch.cat([self.prefix(td), self.llama.embed_tokens(ids[:, :-1])], dim=1)
        out = self.llama(inputs_embeds=embeds, use_cache=False)
        hidden = out.last_hidden_state[:, -ids.shape[1] :]
        return self.head(hidden), self.model.value_head(hidden[:, 0])

    def act_parallel(self, td: TensorDictBase) -> Tensor:
        """Return log-probs of sampled tokens."""
        log_probs = (self.parallel(td)[0] / self.temperature).log_softmax(-1)
        return log_probs.gather(-1, draw_bins(log_probs.exp())[..., None])[..., 0]

    def act_one_by_one(self, td: TensorDictBase) -> Tensor:
        """Return log-probs of tokens sampled with a KV cache."""
        out = self.llama(inputs_embeds=self.prefix(td), use_cache=True)
        chosen = []
        first = self.model.backbone.window.first
        for step in range(self.model.num_tokens):
            hidden = out.last_hidden_state[:, -1]
            if step == 0:
                self.model.value_head(hidden)
            log_probs = (self.head(hidden) / self.temperature).log_softmax(-1)
            token = draw_bins(log_probs.exp())[..., None]
            chosen.append(log_probs.gather(-1, token))
            if step < self.model.num_tokens - 1:
                embeds = self.llama.embed_tokens(token + first)
                out = self.llama(inputs_embeds=embeds, cache=out.cache, use_cache=True)
        return torch.cat(chosen, dim=-1)


class Likelihood:
    """Cross-entropy of stored tokens and a squared value: an objective as small as one can be."""

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def counts(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Return the number of rows."""
        return {"rows": torch.tensor(len(batch))}

    def __call__(self, batch: TensorDictBase, totals: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return both losses."""
        scored = self.policy.score(batch)
        loss = token_cross_entropy(scored["vla_action", "logits"], batch[schema.TOKENS])
        return {
            "loss_policy": loss.mean((1, 2)).sum() / totals["rows"],
            "loss_value": scored[VALUE].square().sum() / totals["rows"],
        }


def bare_update(bare: Bare, forward: Callable, optimizer: torch.optim.Optimizer, td: TensorDict):
    """Take one update by hand; return the loss."""
    logits, value = forward(td)
    target = td[schema.TOKENS].flatten(1)
    loss = functional.cross_entropy((logits / bare.temperature).flatten(0, 1), target.flatten())
    loss = loss + value.square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(bare.model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def variants(
    name: str, decoding: str, ranks: topology.Topology, args: argparse.Namespace
) -> dict[str, Callable[[], object]]:
    """Build both sides of one decoding, check that they agree, and return what is timed."""
    torch.manual_seed(0)
    meta = TabletopSuite().meta
    policy = make_policy(
        meta, size="tiny", decoding=decoding, chunk_size=args.chunk_size, temperature=1.0
    )
    acting, td = observations(policy, args.envs), observations(policy, args.minibatch)
    copied = copy.deepcopy(policy.model.model)
    actor = Bare(policy.model.model, prompt_of(policy, acting), policy.temperature)
    bare = Bare(copied, prompt_of(policy, td), policy.temperature)
    forward = bare.parallel if decoding == "parallel" else bare.forced
    act = actor.act_parallel if decoding == "parallel" else actor.act_one_by_one
    with torch.no_grad():
        ours = policy.unscaled_logits(td).flatten(1, 2)
        torch.testing.assert_close(forward(td)[0], ours, atol=1e-5, rtol=0)
        torch.manual_seed(1)
        log_probs = policy(acting.clone())[schema.LOG_PROBS].flatten(1)
        torch.manual_seed(1)
        torch.testing.assert_close(act(acting), log_probs, atol=1e-4, rtol=0)
    params = list(policy.model.model.parameters())
    groups = [ParameterGroup("policy", params, LR, MAX_NORM)]
    learner = Learner(Likelihood(policy), groups, ranks)
    optimizer = torch.optim.AdamW(copied.parameters(), LR, weight_decay=0.0, fused=True)
    first = learner.update(td.clone())
    by_hand = bare_update(bare, forward, optimizer, td)
    gap = abs(first["loss_policy"] + first["loss_value"] - by_hand)
    if gap > 1e-4:
        raise AssertionError(f"{name}: losses differ by {gap}")

    def decide(choose: Callable[[TensorDict], object]) -> None:
        with torch.no_grad():
            choose(acting.clone(recurse=False))

    return {
        f"{name} decision ours": partial(decide, policy),
        f"{name} decision bare": partial(decide, act),
        f"{name} update ours": lambda: learner.update(td.clone(recurse=False)),
        f"{name} update bare": partial(bare_update, bare, forward, optimizer, td),
    }


def timed(call: Callable[[], object], number: int) -> Sample:
    """Return the median time of ``number`` calls."""
    times = []
    for _ in range(number):
        started = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - started))
    return {UNIT: statistics.median(times)}


def main() -> None:
    """Check, measure and report."""
    parser = command_line(__doc__.splitlines()[0], turns=15)
    parser.add_argument("--envs", type=int, default=8, help="rows of a decision")
    parser.add_argument("--minibatch", type=int, default=16, help="rows of an update")
    parser.add_argument("--chunk-size", type=int, default=4, help="control steps per decision")
    parser.add_argument("--calls", type=int, default=3, help="decisions and updates per turn")
    args = parser.parse_args()
    ranks = topology.start("cpu", threads=1)
    conditions = machine()
    found = variants("OFT", "parallel", ranks, args)
    found |= variants("OpenVLA", "autoregressive", ranks, args)
    samples = take_turns(
        {name: partial(timed, call, args.calls) for name, call in found.items()}, args.turns
    )
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    report("policies", samples, RATIOS, settings=settings, conditions=conditions, out=args.out)
    ranks.stop()


if __name__ == "__main__":
    main()
