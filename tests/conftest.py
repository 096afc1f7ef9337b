"""Fixtures that every kind of test shares."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from millrace.cache.node import close_nodes, nodes_are_open


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `root` are listed as not run for other users."""
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))
