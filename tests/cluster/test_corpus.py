"""Every file of the corpus through the HTTP API: a right answer or a 4xx with a reason, in bounded memory."""

from __future__ import annotations

import gc
import resource
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image

from tests.cluster.served import Served, data_url, error_of, image_part, serving, text_of
from tests.media.corpus import Right, Sample, corpus
from tests.media.pictures import encoded
from triptych.models.registry import ModelSpec

MORE_MB = 400  # of the whole process while it goes through the corpus, whose files are a hundred megabytes
GROWTH_MB = 24  # of a later pass: what leaks does so in each of them, what the allocator keeps it does once
NUM_PASSES = 4

GOOD = Image.new("RGB", (40, 30), "orange")


@pytest.fixture
async def served(spec: ModelSpec) -> AsyncIterator[Served]:
    async with serving(spec) as served:
        yield served


def resident_mb() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() >> 20


def peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


async def assert_right(served: Served, sample: Sample) -> None:
    response = await served.chat(image_part(data_url(sample.content, sample.label)))
    if response.status_code == 200:
        assert sample.right is not Right.REFUSED, f"{sample.name} was answered"
        if sample.right is Right.IMAGE:
            assert text_of(response) == served.expected(sample.reference), sample.name
    else:
        assert sample.right is not Right.IMAGE, f"{sample.name}: {response.text}"
        message, param = error_of(response)
        assert param == "messages.0.content.0", sample.name
        assert "image" in message or "URL" in message, sample.name


async def assert_serving(served: Served) -> None:
    assert text_of(await served.chat(image_part(data_url(encoded(GOOD, "PNG"))))) == served.expected(GOOD)


def test_the_corpus_is_what_it_says() -> None:
    samples = corpus()
    assert len(samples) >= 300
    assert len({sample.name for sample in samples}) == len(samples)
    assert [sample.content for sample in corpus()] == [sample.content for sample in samples]


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow's, about damaged files
async def test_a_part_of_the_corpus(served: Served) -> None:
    for sample in corpus()[::7]:
        await assert_right(served, sample)
        await assert_serving(served)
    await served.settle()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.usefixtures("unlogged")
async def test_every_file_ends_well_in_bounded_memory(served: Served) -> None:
    samples = corpus()
    await assert_serving(served)
    before, peak_before = resident_mb(), peak_mb()
    for sample in samples:
        await assert_right(served, sample)
        if sample.right is not Right.IMAGE:
            await assert_serving(served)
    assert peak_mb() - peak_before < MORE_MB
    await served.settle()
    held = [resident_mb()]
    assert held[0] - before < MORE_MB
    for _ in range(NUM_PASSES):
        for sample in samples:
            await assert_right(served, sample)
        await served.settle()
        held.append(resident_mb())
    assert min(after - before for before, after in pairwise(held)) < GROWTH_MB, held
