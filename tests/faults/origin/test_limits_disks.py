"""Limits on a disk of the cache that cannot store a file: private to the process, and an event has the reason."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.origins import MemoryOrigin

from millrace.events import Event, add_hook
from millrace.origin.base import LimitedOrigin, Limits

pytestmark = pytest.mark.root


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a tmpfs with these options."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        place = tmp_path / f"disk-{len(mounted)}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"no mounts here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield make
    for place in mounted:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("options", ["size=4k", "ro"])
@pytest.mark.parametrize(
    ("limits", "name"), [({"max_requests": 2}, "origin.limits.private"), ({}, "origin.limits.default")]
)
def test_limits_on_a_full_or_read_only_disk_are_private(
    mount: Callable[[str], Path], options: str, limits: dict[str, int], name: str
) -> None:
    place = mount(options)
    if options == "size=4k":
        (place / "filler").write_bytes(b"x" * 4096)
    seen: list[Event] = []
    remove = add_hook(seen.append)
    inner = MemoryOrigin(identity=f"on {options}")
    inner.put("b/k", b"content")
    origin = LimitedOrigin(inner, Limits.of("s3", {"cache_dir": str(place), **limits}))
    try:
        assert [bytes(origin.read("b/k", 0, 7)) for _ in range(5)] == [b"content"] * 5
    finally:
        remove()
    (reported,) = [event for event in seen if event.name.startswith("origin.limits.")]
    assert reported.name == name
    assert str(place) in reported.detail
    assert reported.subject == f"on {options}"
    assert ("No space" in reported.detail) if options == "size=4k" else ("Read-only" in reported.detail)
