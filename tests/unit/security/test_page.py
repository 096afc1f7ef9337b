"""docs/security.md names tests. Each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()
FILES = sorted(set(re.findall(r"\b(?:unit|integration|property|faults|conformance)/(?:\w+/)*test_\w+\.py", PAGE)))
TESTS = sorted(set(re.findall(r"`(test_\w+)`", PAGE)))


def test_security_page_names_tests() -> None:
    assert len(FILES) >= 10
    assert len(TESTS) >= 15


@pytest.mark.parametrize("name", FILES)
def test_file_named_on_security_page_exists(name: str) -> None:
    assert (ROOT / "tests" / name).is_file()


@pytest.mark.parametrize("name", TESTS)
def test_test_named_on_security_page_exists(name: str) -> None:
    assert any(f"def {name}(" in path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
