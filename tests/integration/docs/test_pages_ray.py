"""The code of every page that uses Ray runs as it is written, from top to bottom, with a real S3 server.

The README starts Ray itself. The others join one that runs already, by `RAY_ADDRESS`, as in a submitted job: a start costs
more than most pages do.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.doc_page_runs import ROOT, RUN_WITH_RAY, run_page
from tests.support.ray_sessions import start_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

_OF_READER = ("AWS_", "GLOO_", "MILLRACE_", "OMP_", "XDG_")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a Ray with the CPUs of the machine, as a page starts it."""
    ray = pytest.importorskip("ray")
    start_ray(_node_ip_address="127.0.0.1")
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


@pytest.fixture
def joining(address: str, reader: dict[str, str]) -> dict[str, str]:
    """The environment of a reader whose programs use that Ray; its processes for them have the same variables."""
    variables = {name: value for name, value in reader.items() if name.startswith(_OF_READER)}
    job = {"runtime_env": {"env_vars": variables}}
    return {
        **reader,
        "RAY_ADDRESS": address,
        "RAY_AUTH_TOKEN_PATH": str(Path.home() / ".ray" / "auth_token"),  # Ray made it for `start_ray`
        "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job),
    }


def test_readme_run_from_top_to_bottom_succeeds(reader: dict[str, str], tmp_path: Path) -> None:
    run_page(ROOT / "README.md", reader, tmp_path)


@pytest.mark.parametrize(
    "page", [page for page in RUN_WITH_RAY if page != ROOT / "README.md"], ids=lambda page: page.stem
)
def test_page_run_from_top_to_bottom_succeeds(page: Path, joining: dict[str, str], tmp_path: Path) -> None:
    run_page(page, joining, tmp_path)
