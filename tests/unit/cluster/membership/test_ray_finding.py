"""Waiting for the node of a Ray node, without Ray."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from millrace.cluster.membership import ray as finding


class _Reference:
    pass


def test_wait_that_a_shutdown_ends_keeps_its_references(monkeypatch: pytest.MonkeyPatch) -> None:
    # To release a reference during `ray.shutdown` ends the process.
    reference = _Reference()
    actor = SimpleNamespace(record=SimpleNamespace(remote=lambda: reference))

    def get(*_: object, **__: object) -> None:
        raise SystemExit

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get))
    monkeypatch.setattr(finding, "_references_at_shutdown", [])
    with pytest.raises(SystemExit):
        finding._record_from(actor)
    assert finding._references_at_shutdown == [actor, reference]
