"""Help texts and the options of `millrace` itself."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import millrace as package
from millrace import cli
from millrace.cli import main
from millrace.cli.app import SECTIONS
from millrace.cli.commands import first_sentence
from millrace.cli.logs import log_others_to_stderr, log_to_stderr
from millrace.events import Event, emit


@pytest.fixture(autouse=True)
def default_log() -> Iterator[None]:
    yield
    log_to_stderr(None)


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_help_of_millrace_lists_every_command_in_one_section(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, "--help")
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(cli.millrace.commands)
    assert all(f"{title}:" in text for title in SECTIONS)


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_help_at_any_width_is_never_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cli.add_commands()
    groups = [name for name, each in cli.millrace.commands.items() if isinstance(each, click.Group)]
    for arguments in ([], *([name] for name in groups)):
        text = " ".join(text_of(capsys, *arguments, "--help").split())
        assert "..." not in text.replace("[ARGS]...", "")
        group = cli.millrace.commands[arguments[0]] if arguments else cli.millrace
        assert isinstance(group, click.Group)
        for each in group.commands.values():
            assert first_sentence(each.help or "").replace(" ", "") in text.replace(" ", "")


def test_command_modules_subscript_no_class_of_click() -> None:
    """The classes of click 8.1, the oldest supported version, are not generic: the whole command line would fail."""
    for path in Path(str(cli.__file__)).parent.rglob("*.py"):
        assert not re.search(r"\bclick\.\w+\[", path.read_text()), path


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Load objects. More.", "Load objects"),
        ("Run until Ctrl-C. It then drains.\n\nMore", "Run until Ctrl-C"),
        ("Check URL (s3://bucket/x.parquet)\n can be listed.", "Check URL (s3://bucket/x.parquet) can be listed"),
        ("", ""),
    ],
)
def test_first_sentence_of_a_help_text_ends_at_its_period(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@pytest.fixture
def logging_command(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def talk() -> None:
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("millrace.cache"), level)("%s of\n%s", level, "https://host/key?signature=1")

    cli.add_commands()
    monkeypatch.setitem(cli.millrace.commands, "talk", talk)


@pytest.mark.usefixtures("logging_command")
@pytest.mark.parametrize(
    ("options", "levels"),
    [
        (["-q"], ["error"]),
        (["-v"], ["info", "warning", "error"]),
        (["-vv"], ["debug", "info", "warning", "error"]),
        (["--log-level", "warning"], ["warning", "error"]),
        (["-q", "--log-level", "DEBUG"], ["debug", "info", "warning", "error"]),
    ],
)
def test_command_with_log_options_prints_their_levels_on_stderr(
    capsys: pytest.CaptureFixture[str], options: list[str], levels: list[str]
) -> None:
    assert main([*options, "talk"]) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert [line.split()[2].lower() for line in lines] == levels
    assert all(line.endswith(r"of\nhttps://host/key?...") for line in lines)


def test_node_run_logs_other_warnings_with_time_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    log_others_to_stderr(("cluster.",))
    emit(Event(name="cluster.member.lost", subject="10.0.0.5:7411"))  # the command prints it
    emit(Event(name="cache.over_capacity", subject="a disk", detail="a disk: 3 GB of 2 GB"))
    emit(Event(name="run.saved", subject="a run"))
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"[-0-9]+ [:,0-9]+ WARNING a disk: the cache is larger than its capacity, .*: 3 GB of 2 GB", line
    )


def test_command_with_quiet_and_verbose_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-q", "-v", "status"]) == 2
    assert "exclude each other" in capsys.readouterr().err


def test_quiet_command_prints_errors_but_no_remarks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    package.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0).cat_file(f"{tmp_path}/x")
    there = ["--cache-dir", str(tmp_path / "cache")]
    assert main(["ls", str(tmp_path / "y"), *there]) == 0
    assert "nothing is in the cache" in capsys.readouterr().err
    assert main(["-q", "ls", str(tmp_path / "y"), *there]) == 0
    assert capsys.readouterr().err == ""
    assert main(["-q", "ls", "nonsense", *there]) == 1
    assert capsys.readouterr().err.startswith("millrace: ")
