"""OpenVLA and OpenVLA-OFT: the published checkpoints as policies of this package."""

from torchrl_vla.policies.openvla.attention_check import compare_attention
from torchrl_vla.policies.openvla.export import export
from torchrl_vla.policies.openvla.factory import make_policy

__all__ = ["compare_attention", "export", "make_policy"]
