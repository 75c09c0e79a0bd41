"""A short run of what `python -m tests.fuzz.chat` does for longer."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.chat import ask, request
from tests.fuzz.running import fuzz, serving


def test_requests_follow_from_their_seed() -> None:
    made = [request(random.Random(f"1/{k}")) for k in range(200)]
    assert made == [request(random.Random(f"1/{k}")) for k in range(200)]
    assert {path for path, _ in made} == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"
    }  # fmt: skip


@pytest.mark.slow
async def test_bodies_that_are_valid_but_for_something() -> None:
    async with serving() as deployment:
        outcome = await fuzz(deployment, ask, seconds=20, seed=7)
    assert not outcome.failures, str(outcome)
    assert {200, 400} <= outcome.statuses.keys()
