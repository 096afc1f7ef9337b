"""The reference pages name everything that exists, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.reference import command_tables, error_tables, option_tables, with_tables

from millrace import checkpoint, ray
from millrace.checkpoint import integrations
from millrace.cli import main
from millrace.option_types import FileSystemOptions
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


@pytest.mark.parametrize("tables", [command_tables, option_tables, error_tables])
def test_page_with_another_table_than_declared_is_refused(tables: Callable[[], dict[str, str]]) -> None:
    declared = tables()
    page = "".join(f"<!-- generated: {name} -->\n<!-- end -->\n" for name in declared)
    assert all(table in with_tables(page, declared) for table in declared.values())
    for wrong in (
        page.replace("generated", "written", 1),
        page + page,
        page + page.replace(next(iter(declared)), "other"),
    ):
        with pytest.raises(ValueError, match="the page has the tables"):
            with_tables(wrong, declared)


def test_each_exit_code_is_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    page = (REFERENCE / "command-line.md").read_text()
    main(["--help"])
    text = capsys.readouterr().out
    codes = set(re.findall(r"(?:codes:|;) (\d+) ", re.sub(r"\s+", " ", text)))
    assert codes == set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))


def test_table_of_options_has_each_option_with_a_meaning() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .* \| \S.* \|$", option_tables()["options"], re.MULTILINE)
    assert rows == [*FileSystemOptions.__annotations__]


def test_each_storage_option_is_in_the_reference() -> None:
    page = (REFERENCE / "options.md").read_text()
    section = page[page.index("## target_options") : page.index("**Credentials for S3")]
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
