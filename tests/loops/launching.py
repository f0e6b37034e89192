"""What ``python launch/train.py OVERRIDES`` does, in this process."""

import signal

import torch.distributed as dist
from programs import composed, program


def launch(*overrides: str) -> None:
    """Train (or check) with these overrides; nothing is left behind in this process."""
    cfg = composed("logger.display=false", *overrides)
    before = signal.getsignal(signal.SIGTERM)
    try:
        program("train").main.__wrapped__(cfg)
    finally:
        signal.signal(signal.SIGTERM, before)
        if dist.is_initialized():
            dist.destroy_process_group()
