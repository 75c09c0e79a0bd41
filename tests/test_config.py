"""Where a setting comes from, what is refused and how the refusal names the culprit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from triptych.config import Config, Section, WorkerConfig, load
from triptych.errors import ConfigError
from triptych.types import Stage


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "triptych.toml"
    path.write_text("[engine]\nblock_size = 32\nmax_num_seqs = 4\n[router]\ndeadline_s = 5\n")
    return path


def test_without_a_file_and_flags_it_is_the_defaults() -> None:
    assert load(None, {}) == Config()


def test_a_file_takes_precedence_over_defaults_and_flags_over_the_file(toml: Path) -> None:
    config = load(toml, {"engine": {"max_num_seqs": 8}, "api": {"port": 0}})
    assert config.engine.block_size == 32
    assert config.engine.max_num_seqs == 8
    assert config.engine.max_num_batched_tokens == Config().engine.max_num_batched_tokens
    assert config.router.deadline_s == 5.0
    assert config.api.port == 0


def test_loading_does_not_change_the_defaults(toml: Path) -> None:
    load(toml, {"engine": {"block_size": 1}})
    assert load(None, {}) == Config()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"engine": {"blok_size": 16}}, "blok_size"),
        ({"engnie": {"block_size": 16}}, "engnie"),
        ({"engine": {"block_size": 0}}, r"engine\.block_size"),
        ({"engine": {"block_size": 1.5}}, r"engine\.block_size"),
        ({"engine": {"block_size": "16"}}, r"engine\.block_size"),
        ({"engine": {"num_kv_blocks": -1}}, r"engine\.num_kv_blocks"),
        ({"engine": {"prefix_caching": "yes"}}, r"engine\.prefix_caching"),
        ({"model": {"dtype": "float8"}}, r"model\.dtype"),
        ({"handoff": {"transport": "carrier pigeon"}}, r"handoff\.transport`; it may be auto, shm, tcp, inproc$"),
        ({"handoff": {"lease_ttl_s": 0}}, r"handoff\.lease_ttl_s"),
        ({"router": {"deadline_s": float("nan")}}, r"router\.deadline_s"),
        ({"api": {"port": 65536}}, r"api\.port"),
        ({"api": {"log_level": "loud"}}, r"api\.log_level"),
        ({"media": {"max_images": None}}, r"media\.max_images"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values: dict[str, dict[str, Any]], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(None, values)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("[engine]\nblok_size = 16\n", "blok_size"),
        ("[engine\n", "triptych.toml"),
        ("engine = 3\n", r"triptych\.toml: .*engine"),
        ("[engine]\nblock_size = 0\n", r"triptych\.toml: .*engine\.block_size"),
        ("[model]\ndtype = 'int4'\n", r"triptych\.toml: .*model\.dtype`; it may be auto, bfloat16, float32$"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "triptych.toml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        load(path, {})


def test_a_file_that_has_a_value_for_a_section_is_refused_with_flags_too(tmp_path: Path) -> None:
    path = tmp_path / "triptych.toml"
    path.write_text("engine = 3\n")
    with pytest.raises(ConfigError, match="engine"):
        load(path, {"engine": {"block_size": 8}})


def test_a_file_that_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "triptych.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"triptych\.toml"):
        load(path, {})


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load(tmp_path / "nowhere.toml", {})


def sections() -> list[tuple[str, type[Section]]]:
    return [(field.name, field.type) for field in msgspec.structs.fields(Config)]


@pytest.mark.parametrize(("name", "section"), sections(), ids=[name for name, _ in sections()])
def test_every_field_has_a_description_and_a_default(name: str, section: type[Section]) -> None:
    properties = msgspec.json.schema(section)["$defs"][section.__name__]["properties"]
    for field in msgspec.structs.fields(section):
        assert properties[field.name].get("description"), f"{name}.{field.name} has no description"
        assert not field.required


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().engine.block_size = 1  # type: ignore[misc]


def test_a_workers_configuration_survives_the_way_to_its_process() -> None:
    worker = WorkerConfig(name="e0", stages=[Stage.ENCODE], router_url="http://x", runtime_dir="/run", cores=[1, 2])
    assert msgspec.json.decode(msgspec.json.encode(worker), type=WorkerConfig) == worker
