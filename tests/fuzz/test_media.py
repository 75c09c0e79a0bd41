"""A short run of what `python -m tests.fuzz.media` does for longer."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.media import SMALL_CACHES, ask, body, media
from tests.fuzz.running import fuzz, serving


def test_media_follows_from_its_seed() -> None:
    made = [media(random.Random(f"1/{k}")) for k in range(100)]
    assert made == [media(random.Random(f"1/{k}")) for k in range(100)]
    assert len(set(made)) > 90
    assert body(random.Random("1")) == body(random.Random("1"))


@pytest.mark.slow
@pytest.mark.usefixtures("unlogged")
async def test_bytes_that_were_pictures_once() -> None:
    async with serving(SMALL_CACHES) as deployment:
        outcome = await fuzz(deployment, ask, seconds=20, seed=7)
    assert not outcome.failures, str(outcome)
    assert {200, 400} <= outcome.statuses.keys()
