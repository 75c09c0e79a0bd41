"""Terminal events = accepted requests, right output, and nothing left behind: over random schedules."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cluster.chaos import CLIENT_GONE, Chaos, Pictures, Schedule, make_pictures
from triptych.config import ModelConfig
from triptych.models.registry import ModelSpec, open_model
from triptych.testing_checkpoints import make_checkpoint

PLACEMENTS = ["EPD", "1E/1PD", "1E/1P/1D", "2E/1P/2D", "1EP/1D", "2EPD", "1E/1EPD"]

schedules = st.builds(
    Schedule,
    placement=st.sampled_from(PLACEMENTS),
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 8),
    cancel_share=st.sampled_from([0.0, 0.3, 0.9]),
    num_kills=st.just(0),
    num_kv_blocks=st.sampled_from([24, 40, 200]),
    block_size=st.sampled_from([4, 8]),
    max_num_batched_tokens=st.sampled_from([5, 16, 512]),
    embedding_cache_bytes=st.sampled_from([0, 40_000, 1 << 24]),
    window_embeds=st.sampled_from([1, 30, 1000]),
)
with_kills = st.builds(lambda schedule, num_kills: schedule._replace(num_kills=num_kills), schedules, st.integers(1, 4))


over_tcp = st.builds(lambda schedule: schedule._replace(transport="tcp"), with_kills)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, Pictures]:
    path: Path = tmp_path_factory.mktemp("model")
    make_checkpoint("qwen3_vl", path)
    spec = open_model(str(path), ModelConfig())
    return spec, make_pictures(spec, tmp_path_factory.mktemp("pictures"))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=schedules)
def test_cancels(model: tuple[ModelSpec, Pictures], schedule: Schedule) -> None:
    """Every request that is not cancelled is answered, and right."""
    chaos = Chaos(*model, schedule)
    asyncio.run(chaos.run())
    assert len(chaos.ends) == schedule.num_requests
    assert set(chaos.ends) <= {"length", CLIENT_GONE}
    if schedule.cancel_share == 0:
        assert set(chaos.ends) == {"length"}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=with_kills)
def test_kills_and_cancels(model: tuple[ModelSpec, Pictures], schedule: Schedule) -> None:
    """Workers die and come back: each request still ends once, with the right tokens or with an error that says so."""
    chaos = Chaos(*model, schedule)
    asyncio.run(chaos.run())
    assert len(chaos.ends) == schedule.num_requests
    assert set(chaos.ends) <= {"length", CLIENT_GONE, "NoCapacityError", "WorkerLostError"}


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedule=over_tcp)
def test_kills_and_cancels_over_tcp(model: tuple[ModelSpec, Pictures], schedule: Schedule) -> None:
    """The same when what is handed over takes its time, and its owner may die meanwhile."""
    chaos = Chaos(*model, schedule)
    asyncio.run(chaos.run())
    assert len(chaos.ends) == schedule.num_requests
    assert set(chaos.ends) <= {"length", CLIENT_GONE, "NoCapacityError", "WorkerLostError"}
