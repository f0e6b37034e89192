"""Instructions in words → integer tables, once, at construction; never in the step path."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def build_vocabulary(instructions: Sequence[str]) -> tuple[str, ...]:
    """Return the sorted words of ``instructions``; index 0 of the ids is kept for padding."""
    return tuple(sorted({word for text in instructions for word in text.split()}))


def tokenize(instructions: Sequence[str], vocabulary: Sequence[str], length: int) -> torch.Tensor:
    """Return word ids, int64 ``[num_tasks, length]``, 0-padded at the end.

    Raises:
        ValueError: a word is not in the vocabulary, or an instruction is longer than ``length``.
    """
    index = {word: i + 1 for i, word in enumerate(vocabulary)}
    table = torch.zeros(len(instructions), length, dtype=torch.int64)
    for row, text in enumerate(instructions):
        words = text.split()
        unknown = [word for word in words if word not in index]
        if unknown:
            raise ValueError(
                f"instruction {text!r} uses {unknown}, which the policy's vocabulary of "
                f"{len(index)} words lacks; train a policy on this suite (algo=ground, algo=bc)"
            )
        if len(words) > length:
            raise ValueError(
                f"instruction {text!r} has {len(words)} words; the policy reads {length}"
            )
        table[row, : len(words)] = torch.tensor([index[word] for word in words])
    return table
