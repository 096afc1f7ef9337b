"""The pages of the documentation that have code, and a run of one in a process of its own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.support import doc_pages
from tests.support.fork_server import ForkedProcess, torch_server

ROOT = Path(__file__).parents[2]
_DOCS = ROOT / "docs"
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted(_DOCS.rglob("*.md"))]
    if page.parent != _DOCS / "design" and doc_pages.has_code(page.read_text())
]
RUN = [page for page in PAGES if doc_pages.blocks_of(page.read_text())]
RUN_WITH_RAY = [
    page for page in RUN if any(re.search(r"\bray\b", block.code) for block in doc_pages.blocks_of(page.read_text()))
]


def run_page(page: Path, environment: Mapping[str, str], directory: Path) -> None:
    """Run a page from top to bottom in a directory; fails with its output."""
    log = directory / "output"
    process = ForkedProcess(torch_server(), doc_pages.__file__, str(page), log=log, cwd=directory, env=environment)
    try:
        status = process.wait(timeout=600)
    finally:
        with suppress(ProcessLookupError):  # it ended, and left nothing in the background
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    assert status == 0, log.read_text()
