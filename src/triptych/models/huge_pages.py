"""Memory in huge pages for packed weights, one after the other: a decode step reads all of them, and with small pages a
good part of its time goes to looking pages up.

Called by `packed_linear.py`. The allocator's own huge pages (`THP_MEM_ALLOC_ENABLE`) miss what it recycles: memory that
was touched once stays in small pages.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

PAGE_BYTES = 2 << 20
CHUNK_BYTES = 256 << 20  # of addresses; what is not used is never touched
LINE_BYTES = 64

_lock = threading.Lock()
_chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the last one


def empty(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_elements], uninitialised, it begins with a cache line. It keeps its chunk alive."""
    global _chunk
    num_bytes = -(-num_elements * dtype.itemsize // LINE_BYTES) * LINE_BYTES
    with _lock:
        if num_bytes > len(_chunk):
            _chunk = _new_chunk(max(num_bytes, CHUNK_BYTES))
        taken, _chunk = _chunk[:num_bytes], _chunk[num_bytes:]
    return taken.view(dtype)[:num_elements]


def _new_chunk(num_bytes: int) -> torch.Tensor:
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them: small pages do
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    return chunk[-chunk.data_ptr() % PAGE_BYTES :][:num_bytes]
