"""Fixtures that every kind of test shares."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.cache.node import close_nodes, nodes_are_open
from millrace.events import Event, add_hook
from millrace.filesystem import MillraceFileSystem, filesystem
from millrace.testing.s3 import S3Server


@pytest.fixture(autouse=True, scope="session")
def _hang_ups_count() -> None:
    """Under `nohup` they are ignored, by the tests' own processes as well; these are told what to do with them."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No test sees the user's configuration, or writes to the user's cache."""
    for name in list(os.environ):
        if name.startswith(("MILLRACE_", "AWS_")):
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))


@pytest.fixture(autouse=True)
def _closed_caches() -> Iterator[None]:
    """Every test opens its caches itself."""
    yield
    if nodes_are_open():
        gc.collect()  # readers that a failed test left open still use the nodes
        close_nodes()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all integration tests; every test uses a bucket of its own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh bucket, named after the test's own directory."""
    name = "t-" + "".join(c if c.isalnum() else "-" for c in tmp_path.name.lower()).strip("-")[:50]
    s3.create_bucket(name)
    return name


@pytest.fixture
def s3_options(s3: S3Server, tmp_path: Path) -> dict[str, Any]:
    """Arguments of `millrace.filesystem("s3", ...)` for a cache of the test's own."""
    return {"target_options": s3.target_options, "cache_dir": str(tmp_path / "cache"), "min_free": 0}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., MillraceFileSystem]:
    """Makes file systems over local files, with a cache of the test's own."""

    def build(**options: object) -> MillraceFileSystem:
        return filesystem("file", **{"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options})

    return build


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Every event of the test, as it comes."""
    seen: list[Event] = []
    remove = add_hook(seen.append)
    yield seen
    remove()


@pytest.fixture
def no_cached_plans() -> Iterator[None]:
    """Torch keeps the plans of earlier saves for the whole process."""
    from torch.distributed.checkpoint.planner import SavePlanner

    caches = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached")]
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `root` are listed as not run for other users."""
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))
