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

from millrace.checkpoint import load_weights
from millrace.checkpoint.run.run_layout import open_run
from millrace.testing.s3 import S3Server

pytestmark = [pytest.mark.ray, pytest.mark.slow]

README, RAY_TRAIN = ROOT / "README.md", ROOT / "docs" / "how-to" / "ray-train.md"
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
    run_page(README, reader, tmp_path)


def test_ray_train_page_saves_at_the_endpoint_in_the_environment(
    joining: dict[str, str], s3: S3Server, tmp_path: Path
) -> None:
    run_page(RAY_TRAIN, joining, tmp_path)
    url = "s3://bucket/train/run-1"
    steps = [found.step for found in open_run(url, s3.target_options).scan() if found.complete]
    weights = load_weights(f"{url}/step-{steps[-1]:012d}", target_options=s3.target_options)
    assert set(weights) >= {"model.module.0.weight", "model.module.2.bias"}
    assert all(bool(weights[name].any()) for name in weights if name.startswith("model."))


@pytest.mark.parametrize(
    "page", [page for page in RUN_WITH_RAY if page not in (README, RAY_TRAIN)], ids=lambda page: page.stem
)
def test_page_run_from_top_to_bottom_succeeds(page: Path, joining: dict[str, str], tmp_path: Path) -> None:
    run_page(page, joining, tmp_path)
