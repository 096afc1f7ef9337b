"""The pages of the documentation that have code, and a run of one in a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.support import doc_pages

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
    command = [sys.executable, "-W", "default", doc_pages.__file__, str(page)]
    with open(directory / "output", "w+") as output:
        process = subprocess.Popen(
            command, cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait()
        finally:
            with suppress(ProcessLookupError):  # it ended, and left nothing in the background
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        assert status == 0, output.read()
