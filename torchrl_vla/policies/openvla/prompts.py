"""Instructions to prompt ids, once per instruction, at construction; never in the step path."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

TEMPLATE = "In: What action should the robot take to {}?\nOut:"
LONE_SPACE = 29871
"""Llama-2's piece for a lone space, which ends every training prompt."""
LLAMA_FRAME = (
    (1, 512, 29901, 1724, 3158, 881, 278, 19964, 2125, 304),
    (29973, 13, 3744, 29901),
)
"""Llama-2's ids before and after the instruction."""
LLAMA_VOCABULARY = 32000
Encode = Callable[[str], list[int]]


def render_prompt(instruction: str) -> str:
    """Return the text that the checkpoints were trained with."""
    return TEMPLATE.format(instruction.lower())


def prompt_table(
    instructions: Sequence[str], encode: Encode, pad_id: int, end_id: int | None = None
) -> Tensor:
    """Return prompt ids by ``task_id``, int64 ``[num_tasks, L]``, padded at the end.

    Args:
        instructions: in words.
        encode: text to ids, the start token included.
        pad_id: fills shorter rows.
        end_id: appended unless a prompt ends with it already.

    Raises:
        ValueError: a prompt contains the padding id.
    """
    rows = []
    for text in instructions:
        ids = encode(render_prompt(text))
        if pad_id in ids:
            raise ValueError(f"the prompt for {text!r} contains the padding id {pad_id}: {ids}")
        rows.append(ids if end_id is None or ids[-1] == end_id else [*ids, end_id])
    table = torch.full((len(rows), max(map(len, rows))), pad_id, dtype=torch.int64)
    for row, ids in enumerate(rows):
        table[row, : len(ids)] = torch.tensor(ids)
    return table


def llama_encoder(folder: Path) -> Encode:
    """Return the encoder of a checkpoint's own tokenizer, checked against Llama-2's known ids.

    ``tokenizer.json`` is read as it is: classes that rebuild a tokenizer from its vocabulary have
    changed the ids between releases.

    Raises:
        FileNotFoundError: the folder has no ``tokenizer.json``.
        ValueError: the fixed parts of the prompt get other ids than in training.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: prompts need the checkpoint's tokenizer; copy tokenizer.json from "
            "the model it was fine-tuned from"
        )
    tokenizer = Tokenizer.from_file(str(path))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    front, back = LLAMA_FRAME
    ids = tuple(encode(render_prompt("stack the blocks")))
    core = ids[:-1] if ids[-1] == LONE_SPACE else ids
    if core[: len(front)] != front or core[-len(back) :] != back:
        raise ValueError(
            f"{path} turns the prompt into {list(ids)}; training began with {list(front)} and "
            f"ended with {list(back)}. It is not Llama-2's tokenizer, or lost its start token"
        )
    return encode


def word_encoder(instructions: Sequence[str]) -> tuple[Encode, tuple[str, ...]]:
    """Return a word-level encoder for random weights, and its words (ids from 3 on).

    Ids 0, 1 and 2 are kept for unknown, start and stop, as in Llama's vocabulary.

    Raises:
        ValueError: (from the encoder) a word is new.
    """
    pieces = re.compile(r"\w+|[^\w\s]|\n")
    words = tuple(sorted({w for t in instructions for w in pieces.findall(render_prompt(t))}))
    index = {word: number + 3 for number, word in enumerate(words)}

    def encode(text: str) -> list[int]:
        found = pieces.findall(text)
        unknown = sorted(set(found) - index.keys())
        if unknown:
            raise ValueError(f"{text!r} uses {unknown}, which the {len(words)} words lack")
        return [1, *(index[word] for word in found)]

    return encode, words
