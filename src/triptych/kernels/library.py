"""Loads the compiled kernels and describes their structures: the one place that knows both languages.

Imported in workers by the files of `models/` that run layers natively. The structures are those of `csrc/layers.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_double, c_int64, c_uint8, c_void_p
from functools import cache

from triptych.kernels.build import LIBRARY

TILE = 16  # tokens of a tile of keys or values: a KV block is a whole number of tiles
MAX_HEAD_DIM = 1024


class Activation:
    """What a linear layer does to its outputs; the numbers of `csrc/layers.h`."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2


class Linear(ctypes.Structure):
    """A packed weight with its bias, which may be null."""

    _fields_ = [("panels", c_void_p), ("bias", c_void_p), ("num_outputs", c_int64), ("num_inputs", c_int64)]


class Rounded(ctypes.Structure):
    """A weight in 8 bits, and what that leaves out; see `csrc/likeliest.h`."""

    _fields_ = [
        *((name, c_void_p) for name in ("panels", "steps", "lengths", "errors")),
        *((name, c_int64) for name in ("num_outputs", "num_inputs")),
    ]


class DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("query", "key_value", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "output_norm", "query_norm", "key_norm")),
        *((name, c_int64) for name in ("hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate")),
        *((name, c_double) for name in ("norm_eps", "scale")),
    ]


class Step(ctypes.Structure):
    """`queries` points to int64 [num_queries, 4]: first row, rows, tokens before them, first place in block_table."""

    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin", "slots", "queries", "block_table", "selected")),
        *((name, c_int64) for name in ("num_rows", "num_queries", "num_selected", "block_size", "block_stride")),
    ]


class VisionBlock(ctypes.Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "projection", "up", "down")),
        *((name, c_void_p) for name in ("norm1_weight", "norm1_bias", "norm2_weight", "norm2_bias")),
        *((name, c_int64) for name in ("hidden", "num_heads", "head_dim", "intermediate", "gated", "activation")),
        *((name, c_double) for name in ("norm_eps", "scale")),
    ]


_SIGNATURES = {
    "pack": [c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "linear": [POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p],
    "linear_float": [POINTER(Linear), c_void_p, c_int64, c_void_p],
    "round": [c_void_p, POINTER(Rounded)],
    "likeliest": [POINTER(Rounded), POINTER(Linear), c_void_p, c_int64, c_int64, c_void_p],
    "norm": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_double, c_void_p],
    "decoder_layer": [POINTER(DecoderLayer), POINTER(Step), c_void_p, c_void_p],
    "vision_block": [POINTER(VisionBlock), c_void_p, c_void_p, c_void_p, c_int64, c_void_p],
}


class Kernels:
    """The functions for one element type, "float32" or "bfloat16". They run without the interpreter's lock."""

    pack: Callable[..., None]
    linear: Callable[..., None]
    linear_float: Callable[..., None]
    round: Callable[..., None]
    likeliest: Callable[..., int]
    norm: Callable[..., None]
    decoder_layer: Callable[..., None]
    vision_block: Callable[..., None]

    def __init__(self, library: ctypes.CDLL, dtype: str) -> None:
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"triptych_{name}_{dtype}")
            function.argtypes, function.restype = arguments, c_int64 if name == "likeliest" else None
            setattr(self, name, function)
        library.triptych_packed_elements.argtypes = [c_int64] * 3
        library.triptych_packed_elements.restype = c_int64
        library.triptych_in_tiles.argtypes, library.triptych_in_tiles.restype = [c_int64], c_int64
        self._library = library
        self._is_bfloat16 = int(dtype == "bfloat16")

    def packed_elements(self, num_outputs: int, num_inputs: int) -> int:
        count: int = self._library.triptych_packed_elements(num_outputs, num_inputs, self._is_bfloat16)
        return count

    def in_tiles(self) -> bool:
        """Whether weights that are packed now are multiplied in tile registers."""
        return bool(self._library.triptych_in_tiles(self._is_bfloat16))


@cache
def _library() -> ctypes.CDLL | None:
    if not LIBRARY.exists():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError:  # built elsewhere
        return None
    library.triptych_supported.restype = library.triptych_use_tiles.restype = c_int64
    return library if library.triptych_supported() else None


def available() -> bool:
    """Whether the kernels were built and this processor can run them."""
    return _library() is not None


def set_num_threads(count: int) -> None:
    """Threads of this process that share the work of a call. Without kernels this does nothing."""
    library = _library()
    if library is not None:
        library.triptych_set_num_threads(c_int64(count))


def borrow(uses: ctypes.Array[c_uint8] | None, borrower: int, cores: Sequence[int]) -> None:
    """Calls also compute on those of `cores` that are free by `uses[core]` when they begin. None: no longer.

    `borrower`, 2 to 255, is what they write there meanwhile, another number in each worker.
    `lent_cores.py` says what is written there; it must outlive the calls. Without kernels this does nothing.
    """
    library = _library()
    if library is not None:
        library.triptych_borrow(uses, c_int64(borrower), (c_int64 * len(cores))(*cores), c_int64(len(cores)))


def use_tiles(wanted: bool) -> bool:
    """Whether bfloat16 is multiplied in the tile registers of AMX from now on: by itself it is where there are any.

    Weights that were packed before must not be used after.
    """
    library = _library()
    return library is not None and bool(library.triptych_use_tiles(c_int64(wanted)))


@cache
def kernels(dtype: str) -> Kernels:
    """Raises RuntimeError where they are not `available`."""
    library = _library()
    if library is None:
        raise RuntimeError("the kernels were not built, or this processor cannot run them")
    return Kernels(library, dtype)
