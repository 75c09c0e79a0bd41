"""Flags from config fields, precedence, and what each command makes of its arguments."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from triptych.cli import config as config_command
from triptych.cli import serve, worker
from triptych.cli.main import build_parser, main
from triptych.cli.options import add_config_flags, load_config, options, sources
from triptych.config import Config
from triptych.errors import ConfigError
from triptych.placement import Placement
from triptych.types import Stage


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(parser)
    return parser.parse_args(argv)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "triptych.toml"
    path.write_text("[engine]\nblock_size = 32\nmax_num_seqs = 4\n[model]\npath = 'm'\n")
    return path


def test_every_field_has_a_flag_and_a_description() -> None:
    text = " ".join(argparse.ArgumentParser.format_help(_parser()).split())
    for option in options():
        assert f"--{option.section}-{option.field}".replace("_", "-") in text
        assert option.description, option.key


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    return parser


def test_nothing_given_is_the_default() -> None:
    assert load_config(parse()) == Config()


def test_long_and_short_names() -> None:
    for flag in ("--engine-block-size", "--block-size"):
        assert load_config(parse(flag, "32")).engine.block_size == 32


def test_flags_of_every_kind() -> None:
    config = load_config(
        parse("some/dir", "--dtype", "float32", "--no-prefix-caching", "--deadline-s", "2", "--background", "#000000")
    )
    assert (config.model.path, config.model.dtype) == ("some/dir", "float32")
    assert (config.engine.prefix_caching, config.router.deadline_s) == (False, 2.0)
    assert config.media.background == "#000000"


def test_flags_go_before_the_file_and_the_file_before_defaults(toml: Path) -> None:
    args = parse("--config", str(toml), "--block-size", "64")
    config = load_config(args)
    assert (config.engine.block_size, config.engine.max_num_seqs, config.model.path) == (64, 4, "m")
    assert config.engine.max_num_batched_tokens == Config().engine.max_num_batched_tokens
    found = sources(args)
    assert found["engine.block_size"] == "flag"
    assert found["engine.max_num_seqs"] == str(toml)
    assert found["engine.prefix_caching"] == "default"
    assert found["model.path"] == str(toml)


@pytest.mark.parametrize(
    "argv", [["--block-size", "0"], ["--block-size", "x"], ["--dtype", "int4"], ["--port", "70000"]]
)
def test_a_bad_value_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["serve", "--block-size", "0"], "triptych serve: argument --engine-block-size/--block-size: '0'"),
        (["serve", "--bogus"], "triptych: unrecognized arguments: --bogus"),
        ([], "triptych: the following arguments are required: COMMAND"),
    ],
)
def test_a_usage_error_is_two_lines(argv: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    first, second = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert first.startswith(told)
    assert second == f"see {told.partition(':')[0]} --help"


def test_an_unknown_key_in_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[engine]\nblocksize = 1\n")
    assert main(["config", "--config", str(path)]) == 1
    assert "blocksize" in capsys.readouterr().err


def test_two_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "a", "--model-path", "b"]) == 1
    assert capsys.readouterr().err == "triptych: MODEL and --model-path name two models\n"


def test_config_prints_each_value_and_its_source(toml: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--config", str(toml), "--no-prefix-caching"]) == 0
    lines = {line.split(" = ")[0].strip(): line.split(" = ")[1] for line in capsys.readouterr().out.splitlines()}
    assert lines.keys() == {option.key for option in options()}
    assert lines["engine.block_size"].split() == ["32", "#", str(toml)]
    assert lines["engine.prefix_caching"].split() == ["false", "#", "flag"]
    assert lines["model.path"].split() == ['"m"', "#", str(toml)]
    assert config_command.__doc__


def command(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(argv)


@pytest.mark.parametrize(
    ("argv", "placement"),
    [
        ([], "EPD"),
        (["--encode", "2", "--prefill", "1", "--decode", "2"], "2E/1P/2D"),
        (["--encode", "1", "--prefill-decode", "1"], "1E/1PD"),
        (["--epd", "2"], "2EPD"),
        (["--placement", "1E/1P/1D"], "1E/1P/1D"),
    ],
)
def test_placement_of_serve(argv: list[str], placement: str) -> None:
    assert serve.placement_of(command("serve", *argv)) == Placement.parse(placement)


@pytest.mark.parametrize("argv", [["--encode", "1"], ["--placement", "EPD", "--encode", "1"], ["--encode", "-1"]])
def test_placement_that_cannot_be(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        serve.placement_of(command("serve", *argv))


def test_worker_arguments() -> None:
    base = ["worker", "m", "--name", "x", "--router", "http://r", "--runtime-dir", "/r", "--stages"]
    config = worker.worker_config(command(*base, "encode,prefill", "--cores", "0,2-3"))
    assert (config.name, config.router_url, config.runtime_dir) == ("x", "http://r", "/r")
    assert (config.stages, config.cores, config.num_threads) == ([Stage.ENCODE, Stage.PREFILL], [0, 2, 3], 3)
    for bad in (["encode,sing"], ["encode", "--cores", "a"]):
        with pytest.raises(ConfigError):
            worker.worker_config(command(*base, *bad))


def test_cores_that_are_not_there_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 5})
    assert main(["serve", "--pin", "epd=1,99"]) == 1
    assert capsys.readouterr() == ("", "triptych: --pin epd: core 99 does not exist; there are 0-2,5\n")
    base = ["worker", "--name", "x", "--stages", "encode", "--router", "http://r", "--runtime-dir", str(tmp_path)]
    assert main([*base, "--cores", "4"]) == 1
    assert capsys.readouterr().err == "triptych: --cores: core 4 does not exist; there are 0-2,5\n"


def test_a_runtime_directory_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On the router's host it is the router's; with a join file the worker's own, which it makes."""
    missing = str(tmp_path / "new")
    base = ["worker", "--name", "x", "--stages", "encode", "--runtime-dir", missing]
    assert main([*base, "--router", "http://127.0.0.1:1"]) == 1
    assert f"--runtime-dir {missing}: no such directory; the router makes it" in capsys.readouterr().err
    worker.check_runtime_dir(worker.worker_config(command(*base, "--join-file", "j", "--host", "10.0.0.1")))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_help_and_config_do_not_import_torch() -> None:
    """The parser of all commands, and the modules of the router process that have no torch of their own."""
    code = (
        "import sys, triptych.cli.main as m; m.build_parser().format_help(); import triptych.launch, triptych.api.app;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
