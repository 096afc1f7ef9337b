"""The reference pages name everything that exists, and nothing else."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from millrace import checkpoint, cli, config, errors, ray
from millrace.checkpoint import integrations
from millrace.cli import main
from millrace.errors import MillraceError
from millrace.origin import SCHEMES
from millrace.origin.hub.options import HUB_OPTIONS
from millrace.origin.options.azure import AZURE_OPTIONS
from millrace.origin.options.gcs import GCS_OPTIONS
from millrace.origin.options.s3 import S3_CLIENT_KWARGS, S3_OPTIONS
from millrace.origin.web.options import CLIENT_KWARGS, WEB_OPTIONS

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


def test_api_page_lists_every_public_name() -> None:
    listed = re.findall(r"^::: (millrace[\w.]*)\.(\w+)$", (REFERENCE / "api.md").read_text(), re.MULTILINE)
    for module in (checkpoint, integrations, ray):
        assert sorted(name for package, name in listed if package == module.__name__) == sorted(module.__all__)


def test_each_error_has_a_row_in_the_reference() -> None:
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, MillraceError)]
    rows = re.findall(r"^\| `(\w+)` \| `([\w-]+)` \| `(\w+)` \|", (REFERENCE / "errors.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(cls.__name__ for cls in classes)
    for name, code, builtin in rows:
        cls = getattr(errors, name)
        assert cls.code == code
        assert builtin in [base.__name__ for base in cls.__mro__ if base.__module__ == "builtins"]


def test_each_command_and_option_is_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])  # adds the commands
    page = (REFERENCE / "command-line.md").read_text()
    sections = dict(re.findall(r"^## millrace ([\w ]+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    commands = dict(_commands(cli.millrace, ""))
    assert sorted(sections) == sorted(commands)
    for name, command in commands.items():
        rows = [row for row in sections[name].splitlines() if row.startswith("| `--")]
        reported = {option for row in rows for option in re.findall(r"`(--?[\w-]+)`", row.split("|")[1])}
        options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
        assert reported == {text for option in options for text in (*option.opts, *option.secondary_opts)}


def _commands(group: click.Group, before: str) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, by its whole name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def test_each_exit_code_is_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REFERENCE / "command-line.md").read_text()
    main(["--help"])
    text = capsys.readouterr().out
    codes = set(re.findall(r"(?:codes:|;) (\d+) ", re.sub(r"\s+", " ", text)))
    assert codes == set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))


def test_each_file_system_option_is_in_the_reference() -> None:
    page = (REFERENCE / "options.md").read_text()
    for name in config.OPTION_NAMES:
        assert f"`{name}`" in page


def test_each_storage_option_is_in_the_reference() -> None:
    page = (REFERENCE / "options.md").read_text()
    section = page[page.index("## target_options") : page.index("**Where credentials")]
    rows = dict(re.findall(r"^\| `(\w+)`[^|]*\|(.*)\|$", section, re.MULTILINE))
    known = {
        "s3": (*S3_OPTIONS, *S3_CLIENT_KWARGS),
        "az": AZURE_OPTIONS,
        "gs": GCS_OPTIONS,
        "hf": HUB_OPTIONS,
        "http": (*WEB_OPTIONS, *CLIENT_KWARGS),
    }
    for protocol, names in known.items():
        assert set(re.findall(r"`(\w+)`", rows[protocol])) == set(names), protocol


def test_each_scheme_is_in_the_reference() -> None:
    page = (REFERENCE / "fsspec.md").read_text()
    for alias in SCHEMES:
        assert f"{alias}://" in page or f'"{alias}"' in page
