"""Operations and bounds, against numbers made by hand."""

import json
from pathlib import Path

import pytest

from triptych.bench.bound import MARKERS, ModelShape, bounds, cell_flops
from triptych.bench.ceilings import Ceiling
from triptych.bench.machine import describe
from triptych.bench.metrics import RequestRecord, summarize
from triptych.bench.results import Cell, Results
from triptych.bench.settings import BenchSettings, Spec
from triptych.bench.systems import System
from triptych.bench.workload import Load
from triptych.errors import ConfigError

CONFIG = {
    "text_config": {
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "intermediate_size": 10,
        "vocab_size": 100,
    },
    "vision_config": {
        "depth": 3,
        "hidden_size": 6,
        "intermediate_size": 12,
        "out_hidden_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "patch_size": 4,
        "deepstack_visual_indexes": [1],
    },
}


@pytest.fixture
def shape(tmp_path: Path) -> ModelShape:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return ModelShape.read(tmp_path)


def test_weights(shape: ModelShape) -> None:
    query, key_value, output, mlp = 8 * 8, 2 * 8 * 4, 8 * 8, 3 * 8 * 10
    assert shape.layer_weights == query + key_value + output + mlp
    assert shape.weights_a_token == 2 * 432 + 800


def test_a_prompt_of_three_tokens_and_two_outputs(shape: ModelShape) -> None:
    """Four tokens pass the layers; token k attends to k, with scores and values in two heads of four."""
    layer = 4 * 2 * 432 + (1 + 2 + 3 + 4) * 2 * (2 * 2 * 4)
    assert shape.prompt_flops(3, 2) == 2 * layer + 2 * (2 * 800)


def test_an_image_of_two_embeds(shape: ModelShape) -> None:
    """Eight patches of 3 x 2 x 4 x 4 numbers, three blocks, two mergers from 24 over 24 to 8."""
    patches = 8 * 2 * 96 * 6
    block = 8 * 2 * (4 * 36 + 2 * 72) + 2 * (2 * 8 * 8 * 6)
    merger = 2 * 2 * (24 * 24 + 24 * 8)
    assert shape.image_flops(2) == patches + 3 * block + 2 * merger


def test_another_models_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {}}')
    with pytest.raises(ConfigError, match="not the shape"):
        ModelShape.read(tmp_path)


def _results(num_images: int, num_prompt_tokens: int) -> Results:
    record = RequestRecord(
        index=0,
        kind="images",
        num_images=num_images,
        asked_output_tokens=2,
        due_s=0.0,
        sent_s=0.0,
        chunk_s=[1.0, 2.0],
        end_s=2.0,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=2,
    )
    cell = Cell(
        round=0,
        position=0,
        system="a",
        workload="W1",
        load=Load(concurrency=1),
        seed=0,
        summary=summarize([record], 1, {}, 2.0),
        cpu_s=2.0,
        own_cpu_s={},
        counters={},
        peak_rss_bytes=None,
        num_processes=None,
        client_cpu_s=0.0,
        records=[record],
    )
    spec = Spec(settings=BenchSettings(), systems=(System(name="a", url="http://a"),), workloads=())
    return Results(spec=spec, machine=describe(), cells=[cell])


def test_the_bound_of_a_cell_counts_prompts_images_and_outputs(shape: ModelShape) -> None:
    """Two images of three embeds between their markers, in ten tokens of text."""
    results = _results(num_images=2, num_prompt_tokens=10 + 2 * (MARKERS + 3))
    flops = shape.prompt_flops(20, 2) + 2 * shape.image_flops(3)
    assert cell_flops(shape, results.cells[0], text_tokens=10) == flops
    results.ceilings.append(Ceiling(0, bf16_gflops=flops / 1e9, fp32_gflops=1.0, read_gb_per_s=1.0))
    _, decode, line = bounds(shape, results, text_tokens=10)
    assert decode.endswith(f"{shape.weights_a_token * 2 / 1e6:.2f} ms a token")
    assert line.endswith("1.000 of 2.000 core-s a request: 50.0%")


def test_without_ceilings_there_is_no_bound(shape: ModelShape) -> None:
    with pytest.raises(ConfigError, match="no ceilings"):
        list(bounds(shape, _results(0, 10), 37))
