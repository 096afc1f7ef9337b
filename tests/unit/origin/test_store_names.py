"""Keys that object stores refuse before any request: the address has no server."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.errors import ObjectNotFoundError, OriginUnavailableError, UsageError
from millrace.origin.object_store import ObjectStoreOrigin

SCHEMES = {
    "s3": {"endpoint_url": "http://127.0.0.1:1", "key": "k", "secret": "s"},
    "az": {"account_name": "a", "account_key": "a2V5", "account_host": "http://127.0.0.1:1/a"},
    "gs": {"endpoint_url": "http://127.0.0.1:1", "token": "anon"},
}
REFUSED = [
    "a//b",
    "a/./b",
    "a/../b",
    "../a",
    "./a",
    "a/..",
    "a/.",
    "..",
    ".",
    "\x00",
    "a\nb",
    "a\x1f",
    "a\x7fb",
    "a\ud800",
    "\udfff",
]
TAKEN = [
    "a",
    "a/b",
    ".a",
    "..a",
    "a.",
    "a..",
    "...",
    "a/.../b",
    "a/.b/..c",
    "a b",
    "ä/ß",
    "\x80",
    "\ue000",
    "a%2Fb",
    "~",
    "/a",
    "a/",
]


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("name", REFUSED)
def test_key_that_equals_another_after_decoding_is_refused(scheme: str, name: str) -> None:
    origin = ObjectStoreOrigin(scheme, SCHEMES[scheme])
    for question in (
        lambda: origin.head(f"b/{name}"),
        lambda: origin.read(f"b/{name}", 0, 1),
        lambda: origin.list_level(f"b/{name}/x"),
    ):
        with pytest.raises(ObjectNotFoundError, match="not a valid object name"):
            question()


@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("bucket", ["b k", "b%20k", "b\x01", "b<k>", "b?", "b\\k", "b\nk", "bück"])
def test_bucket_with_characters_that_no_bucket_has_is_refused(scheme: str, bucket: str) -> None:
    with pytest.raises(ObjectNotFoundError, match="is not the name of a"):
        ObjectStoreOrigin(scheme, SCHEMES[scheme]).head(f"{bucket}/x")


@pytest.mark.parametrize("bucket", ["b", "B_1.x-y", "$web", "arn:aws:s3:us-east-1:1:accesspoint"])
def test_bucket_with_an_unusual_name_is_requested(bucket: str) -> None:
    with pytest.raises(OriginUnavailableError):
        ObjectStoreOrigin("s3", SCHEMES["s3"]).head(f"{bucket}/x")


@pytest.mark.parametrize("name", TAKEN)
def test_key_that_only_resembles_another_is_requested(name: str) -> None:
    origin = ObjectStoreOrigin("s3", SCHEMES["s3"])
    with pytest.raises(OriginUnavailableError):
        origin.head(f"b/{name}".replace("//", "/"))


@pytest.mark.parametrize("name", [*REFUSED, "a//b"])
def test_local_file_with_refused_name_raises_object_not_found(name: str) -> None:
    with pytest.raises(ObjectNotFoundError, match="not a valid object name"):
        ObjectStoreOrigin("file", {}).head(f"/tmp/{name}/x")


def test_error_about_local_directory_contains_its_url(tmp_path: Path) -> None:
    (tmp_path / "a\x01b").write_bytes(b"")
    with pytest.raises(UsageError, match=f"^file://{tmp_path} contains an object whose name cannot be used"):
        ObjectStoreOrigin("file", {}).list_level(str(tmp_path))


@pytest.mark.parametrize("length", [254, 255])
def test_write_of_a_local_name_without_room_for_a_mark_is_refused(tmp_path: Path, length: int) -> None:
    origin = ObjectStoreOrigin("file", {})
    with pytest.raises(ObjectNotFoundError, match="use a shorter one"):
        origin.put(str(tmp_path / ("n" * length)), b"x")
    assert list(tmp_path.iterdir()) == []


def test_local_file_named_as_an_unfinished_write_is_refused(tmp_path: Path) -> None:
    origin = ObjectStoreOrigin("file", {})
    folder = tmp_path / "run#1"
    folder.mkdir()
    (folder / "x#1").write_bytes(b"a")
    (folder / "x#1a").write_bytes(b"bc")
    assert [entry.key for entry in origin.list_level(str(folder)).objects] == [str(folder / "x#1a")]
    assert origin.head(f"{folder}/x#1a").size == 2
    for request in (
        lambda: origin.head(f"{folder}/x#1"),
        lambda: origin.read(f"{folder}/x#1", 0, 1),
        lambda: origin.put(f"{folder}/x#2", b""),
    ):
        with pytest.raises(ObjectNotFoundError, match="not a valid object name: rename it"):
            request()
