"""The code of every page but the decision records runs as it is written, from top to bottom, with a real S3 server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.doc_page_runs import PAGES, RUN, RUN_WITH_RAY, run_page


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if page not in RUN_WITH_RAY], ids=lambda page: page.stem)
def test_page_run_from_top_to_bottom_succeeds(page: Path, reader: dict[str, str], tmp_path: Path) -> None:
    run_page(page, reader, tmp_path)


@pytest.mark.parametrize("page", [page for page in PAGES if page not in RUN], ids=lambda page: page.stem)
def test_page_without_code_to_run_states_the_reason(page: Path) -> None:
    assert "*No code of this page is run by the tests: " in page.read_text()
