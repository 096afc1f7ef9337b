"""The code of every page that uses Ray runs as it is written, from top to bottom, with a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.doc_page_runs import RUN_WITH_RAY, run_page

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.parametrize("page", RUN_WITH_RAY, ids=lambda page: page.stem)
def test_page_run_from_top_to_bottom_succeeds(page: Path, reader: dict[str, str], tmp_path: Path) -> None:
    run_page(page, reader, tmp_path)
