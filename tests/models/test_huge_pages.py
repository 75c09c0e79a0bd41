"""Packed weights lie in chunks of memory: aligned, apart from each other, and theirs for as long as they live."""

from __future__ import annotations

import gc

import pytest
import torch

from triptych.models import huge_pages


def test_pieces_are_aligned_and_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "CHUNK_BYTES", 10_000)
    counts = [1, 31, 33, 4_000, 5_000, 7, 40_000, 1, 0]
    pieces = [huge_pages.empty(count, torch.bfloat16) for count in counts]
    for number, piece in enumerate(pieces):
        piece.fill_(number)
    gc.collect()
    for number, (count, piece) in enumerate(zip(counts, pieces, strict=True)):
        assert piece.shape == (count,)
        assert piece.dtype == torch.bfloat16
        assert piece.data_ptr() % huge_pages.LINE_BYTES == 0
        assert (piece == number).all()


def test_a_chunk_begins_at_a_huge_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_chunk", torch.empty(0, dtype=torch.uint8))
    assert huge_pages.empty(10, torch.float32).data_ptr() % huge_pages.PAGE_BYTES == 0


def test_memory_goes_with_its_last_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    def mapped_kib() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmSize"))

    monkeypatch.setattr(huge_pages, "_chunk", torch.empty(0, dtype=torch.uint8))
    gc.collect()
    before_kib = mapped_kib()
    pieces = [huge_pages.empty(300 << 20, torch.uint8) for _ in range(4)]
    assert mapped_kib() - before_kib >= 4 * 300 << 10
    pieces.clear()  # what is left of the last chunk keeps that one
    gc.collect()
    assert mapped_kib() - before_kib < 2 * 300 << 10
