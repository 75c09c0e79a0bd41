"""Tensors as bytes: dtype names on the wire, tensors that lie in a pool, one copy out of another's pool.

Runs in every worker, on its compute thread; called by `embedding.py` and `kv.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from triptych.errors import ChecksumError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def dtype_of(name: str) -> torch.dtype:
    """Raises ValueError for a dtype that no stage hands off."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """Raises ValueError for a dtype that no stage hands off."""
    try:
        return _NAMES[dtype]
    except KeyError:
        raise ValueError(f"{dtype} is not one of {', '.join(_DTYPES)}") from None


def tensor_over(memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor that lies in writable `memory` and keeps it alive."""
    if not len(memory):
        return torch.empty(shape, dtype=dtype)  # frombuffer takes no empty buffer
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def bytes_of(tensor: torch.Tensor) -> NDArray[Any]:
    """The bytes of a contiguous CPU tensor, shared with it, as a flat uint8 array."""
    # By way of uint8, because numpy has no bfloat16.
    return tensor.detach().view(-1).view(torch.uint8).numpy()


def checksum(data: NDArray[Any]) -> int:
    """xxh3_64 of what `bytes_of` returns."""
    return xxhash.xxh3_64_intdigest(data.data)


def copy_checked(source: memoryview, into: torch.Tensor, expected: int, what: str) -> None:
    """Copy another's bytes into a contiguous CPU tensor of the same size, in one pass.

    The checksum is taken of the copy: the source may change between a check of it and the copy. Raises ChecksumError.
    """
    target = bytes_of(into)
    np.copyto(target, np.frombuffer(source, dtype=np.uint8))
    actual = checksum(target)
    if actual != expected:
        raise ChecksumError(f"{what}: bytes have checksum {actual:016x}, {expected:016x} was published")
