"""Complete, atomic, resharding checkpoints: what a run needs to go on as if it had never stopped.

A checkpoint is a folder ``root/step-000000200``::

    dcp/                    parameters, buffers, optimizer moments (torch.distributed.checkpoint)
    optimizers.json         hyper-parameters, and which parameter has which moments
    shared.json  shared.safetensors          counters and plain tensors, equal on all ranks
    rank-00000.json  rank-00000.safetensors  what differs per rank, such as random states
    manifest.json           size and blake2b of every file above; written last

It is written under ``root/.tmp-step-...``, synced to disk, given its manifest and then renamed: a
folder named ``step-...`` was complete once, and its manifest tells whether it still is. Any number
of ranks reads what any other number wrote.

Safety: ``dcp/.metadata`` is a pickle, because torch writes it so; nothing else is (tensors in
``dcp/`` are read with ``weights_only=True``). Reading a pickle can run code. The manifest is
checked before any of it is read, so a damaged file is refused; but a manifest is not a signature:
whoever can write the folder can write both. Load only checkpoints whose author you trust.

A save can go on in the background: what is saved is copied, then written by a thread whose
collectives have a process group of their own. Until it is renamed, the folder is a partial one.

What this room does not do: save the replay (it is its own durable copy; loops put its cursor into
``shared.json``) or decide when to save.
"""

from torchrl_vla.checkpoint.checkpointer import Checkpointer
from torchrl_vla.checkpoint.random_state import rng_state, set_rng_state
from torchrl_vla.checkpoint.space import check_space

__all__ = ["Checkpointer", "check_space", "rng_state", "set_rng_state"]
