"""Action numbers as tokens: bins at the tail of a vocabulary (OpenVLA's scheme).

A number in [-1, 1] falls between two of ``V`` equally spaced edges; its token is counted from the
end of the real vocabulary, so *a higher id is a lower value*. Policies speak of **bins**, the place
in the window of the action ids (0 is the highest value); ids exist only inside a model. Ids never
pass through text.

Legend: ``*`` batch dims, ``A`` action dims, ``V`` bins.

Source: Kim et al. 2024, "OpenVLA", arXiv:2406.09246, section 3.2 (action de-tokenizer).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torchrl.data.vla.tokenizers import ActionTokenizerBase

from torchrl_vla.policies.statistics import ActionSpace


@dataclass(frozen=True)
class ActionWindow:
    """Which vocabulary ids are action bins.

    Args:
        vocabulary: real ids; the columns that pad an LM head to a multiple of 64 do not count
            (Llama-2: 32000 of 32064).
        num_bins: ``V``.
    """

    vocabulary: int
    num_bins: int = 256

    def __post_init__(self) -> None:
        if not 2 <= self.num_bins <= self.vocabulary:
            raise ValueError(
                f"num_bins is {self.num_bins}; it must be in 2..{self.vocabulary}, the vocabulary"
            )

    @property
    def first(self) -> int:
        """The lowest action id (31744 for Llama-2 and 256 bins)."""
        return self.vocabulary - self.num_bins

    @property
    def columns(self) -> slice:
        """The action ids as rows of an LM head."""
        return slice(self.first, self.vocabulary)

    def ids(self, bins: Tensor) -> Tensor:
        """Map bins to vocabulary ids, int64.

        Raises:
            ValueError: a bin is outside 0..V-1.
        """
        self._check(bins, 0, self.num_bins - 1, "bins", "pass bins, not vocabulary ids")
        return bins + self.first

    def bins(self, ids: Tensor) -> Tensor:
        """Map vocabulary ids to bins, int64.

        Raises:
            ValueError: an id is not an action (31743 and 32000 are next to the window).
        """
        fix = "restrict the choice to the window, or call nearest_bins() to accept others"
        self._check(ids, self.first, self.vocabulary - 1, "ids", fix)
        return ids - self.first

    def nearest_bins(self, ids: Tensor) -> Tensor:
        """Map any ids to bins: ids below the window count as its first, ids above as its last.

        For models that choose over the whole vocabulary, as the original decoders do.
        """
        return (ids - self.first).clamp(0, self.num_bins - 1)

    @staticmethod
    def _check(values: Tensor, low: int, high: int, name: str, fix: str) -> None:
        if values.dtype != torch.int64:
            raise TypeError(f"{name} have dtype {values.dtype}, not torch.int64")
        if not values.numel():
            return
        found = tuple(int(bound) for bound in values.aminmax())
        if found[0] < low or found[1] > high:
            raise ValueError(f"{name} span {found[0]}..{found[1]}, outside {low}..{high}; {fix}")


class TailBins(ActionTokenizerBase):
    """TorchRL's tokenizer contract for these bins: control vectors to bins and back.

    ``V`` edges have ``V - 1`` centres: bins 0 and 1 both mean the highest centre, and only an
    action of exactly +1 falls into bin 0.

    Args:
        num_bins: ``V``.
        space: maps between the simulator's action units and [-1, 1]; None if they are the same.

    Differs: TorchRL's ``VocabTailActionTokenizer`` takes NaN for +1, clips foreign ids silently,
    and divides constant dimensions by 1e-8.
    """

    def __init__(self, num_bins: int = 256, space: ActionSpace | None = None) -> None:
        super().__init__()
        # NumPy's: torch's differ in the last bit, and an action on an edge would change its bin.
        edges = torch.from_numpy(np.linspace(-1, 1, num_bins))
        centres = (edges[:-1] + edges[1:]) / 2
        self.register_buffer("edges", edges, persistent=False)
        by_bin = torch.cat([centres, centres[-1:]]).flip(0)
        self.register_buffer("centres", by_bin, persistent=False)
        self.space = space

    @property
    def vocab_size(self) -> int:
        """Number of bins (``V``)."""
        return len(self.edges)

    def encode(self, actions: Tensor) -> Tensor:
        """Map control vectors ``[*, A]`` to bins, int64 ``[*, A]``.

        Values beyond the statistics' range take the outermost bin, as in training: q01 and q99
        leave 2 % of the data outside.

        Raises:
            ValueError: an action is not finite.
        """
        if not bool(actions.isfinite().all()):
            raise ValueError("actions hold NaN or inf, which no bin stands for; check the data")
        values = actions if self.space is None else self.space.from_simulator(actions)
        index = torch.bucketize(values.to(self.edges).clamp(-1, 1), self.edges, right=True)
        return self.vocab_size - index

    def decode(self, tokens: Tensor) -> Tensor:
        """Map bins ``[*, A]`` to control vectors, float32 ``[*, A]``."""
        return self.to_simulator(self.centres[tokens])

    def to_simulator(self, values: Tensor) -> Tensor:
        """Map values in [-1, 1], such as an expected centre, to control vectors, float32."""
        return (values if self.space is None else self.space.to_simulator(values)).float()
