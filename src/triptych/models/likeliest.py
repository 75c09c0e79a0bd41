"""The likeliest token of a row, for requests that want no more than that: exactly, without most of the head's products.

Made by `native_language.py` beside the packed head, whose weights it has in 8 bits: `csrc/likeliest.h` says how bounds
from these leave few logits to compute. Memory: half of the head's in bfloat16.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from triptych.kernels import library
from triptych.models import huge_pages
from triptych.models.packed_linear import PackedLinear, kernels_for

LANES = 16  # outputs whose logits are computed at once; a row is a whole number of so many inputs
MOST_SHARE = 16  # a row whose token might be in more than one of so many vectors is left to the head
# Where one of so many is computed in the mean, batches gain nothing: single outputs take several times as long as in a
# product with all rows. After so many rows that is known.
USUAL_SHARE = 32
TRIED_ROWS = 1024


class Likeliest:
    """Not for models whose bounds leave too many logits open: it finds that out and then `helps` no longer."""

    def __init__(self, weight: torch.Tensor, head: PackedLinear) -> None:
        """`weight` [vocabulary, hidden], which `head` is packed from. `can_round` it."""
        self._head = head
        self._kernels = kernels_for(weight.dtype)
        num_outputs, num_inputs = weight.shape
        num_vectors = -(-num_outputs // LANES)
        self._panels = huge_pages.empty(num_vectors * LANES * num_inputs, torch.uint8)
        self._numbers = torch.zeros((3, num_vectors * LANES), dtype=torch.float32)
        pointers = [numbers.data_ptr() for numbers in self._numbers]
        self._struct = library.Rounded(self._panels.data_ptr(), *pointers, num_outputs, num_inputs)
        weight = weight.detach().contiguous()
        self._kernels.round(weight.data_ptr(), ctypes.byref(self._struct))
        self._num_vectors = num_vectors
        self._num_rows = self._num_asked = 0  # rows so far, and vectors whose logits were computed for them

    @staticmethod
    def can_round(weight: torch.Tensor) -> bool:
        """Sums in tile registers have an order of their own, which is not repeated here."""
        return weight.shape[1] % LANES == 0 and not kernels_for(weight.dtype).in_tiles()

    @property
    def helps(self) -> bool:
        usual = self._num_vectors // USUAL_SHARE + 1
        return self._num_rows < TRIED_ROWS or self._num_asked <= usual * self._num_rows

    def tokens(self, rows: torch.Tensor) -> list[int | None]:
        """Of each row [n, hidden] in the head's dtype; None: its logits have to say it."""
        rows = rows.contiguous()
        tokens = np.empty(len(rows), dtype=np.int64)
        rounded, head = ctypes.byref(self._struct), ctypes.byref(self._head.struct)
        most = self._num_vectors // MOST_SHARE + 1
        num_asked = self._kernels.likeliest(rounded, head, rows.data_ptr(), len(rows), most, tokens.ctypes.data)
        self._num_rows += len(rows)
        self._num_asked += num_asked
        return [token if token >= 0 else None for token in tokens.tolist()]
