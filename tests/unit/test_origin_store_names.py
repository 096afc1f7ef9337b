"""Keys that object stores refuse before any request: nobody listens where they would go."""

from __future__ import annotations

import pytest

from millrace.errors import ObjectNotFoundError, OriginUnavailableError
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
def test_what_another_name_would_be_is_refused(scheme: str, name: str) -> None:
    origin = ObjectStoreOrigin(scheme, SCHEMES[scheme])
    for question in (
        lambda: origin.head(f"b/{name}"),
        lambda: origin.read(f"b/{name}", 0, 1),
        lambda: origin.list_level(f"b/{name}/x"),
    ):
        with pytest.raises(ObjectNotFoundError, match="no valid object name"):
            question()


@pytest.mark.parametrize("name", TAKEN)
def test_what_only_looks_like_it_is_asked_for(name: str) -> None:
    origin = ObjectStoreOrigin("s3", SCHEMES["s3"])
    with pytest.raises(OriginUnavailableError):
        origin.head(f"b/{name}".replace("//", "/"))


@pytest.mark.parametrize("name", [*REFUSED, "a//b"])
def test_files_have_the_same_rule(name: str) -> None:
    with pytest.raises(ObjectNotFoundError, match="no valid object name"):
        ObjectStoreOrigin("file", {}).head(f"/tmp/{name}/x")
