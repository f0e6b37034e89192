"""Who gets which weights: everything the first time, then what is trained, buffers always."""

import copy

import torch
from torch import nn

from torchrl_vla.loops.publishing import Publishing


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.adapter, self.idle = nn.Linear(2, 2), nn.Linear(2, 2), nn.Module()
        self.trunk.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


class Mailbox:
    """Stands for the actors: keeps what is published."""

    def __init__(self):
        self.got = []

    def publish(self, weights, version):
        self.got.append((version, weights))


def test_frozen_weights_are_published_once():
    policy, mailbox = Net(), Mailbox()
    evaluated = copy.deepcopy(policy)
    publish = Publishing(policy, evaluated, mailbox)
    publish(3)
    with torch.no_grad():
        policy.adapter.weight += 1.0
        policy.mean += 4.0
        policy.count += 4
    before = evaluated.adapter.weight.clone()
    publish(4, share=0.25)
    assert [version for version, _ in mailbox.got] == [3, 4]
    keys = [{".".join((k,) if isinstance(k, str) else k) for k in w.keys(True, True)}
            for _, w in mailbox.got]  # fmt: skip
    assert keys[0] == {name for name, _ in [*policy.named_parameters(), *policy.named_buffers()]}
    assert keys[1] == {"adapter.weight", "adapter.bias", "mean", "count"}
    # the evaluated copy: a quarter of the way for numbers, all of it for integers
    torch.testing.assert_close(evaluated.adapter.weight, before + 0.25)
    assert evaluated.mean.tolist() == [1.0, 1.0]
    assert int(evaluated.count) == 4
    assert torch.equal(evaluated.trunk.weight, policy.trunk.weight)
    # what was published is a copy, not a view of the learner's parameters
    assert not torch.equal(mailbox.got[0][1]["adapter", "weight"], policy.adapter.weight)
