"""One copy of a large policy that acts for many simulator processes."""

from torchrl_vla.serving.server import PolicyServer, PolicyServerError, RemotePolicy, examples

__all__ = ["PolicyServer", "PolicyServerError", "RemotePolicy", "examples"]
