"""Web servers pass the conformance suite as far as they can, with and without ranges and other features."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.web_server import WebServer

from millrace.errors import ObjectNotFoundError
from millrace.origin import Origin, open_origin
from millrace.testing.conformance import OriginConformance
from millrace.testing.conformance.origin import Contents


@pytest.fixture(scope="module")
def with_ranges() -> Iterator[WebServer]:
    with WebServer() as server:
        yield server


@pytest.fixture(scope="module")
def without_ranges() -> Iterator[WebServer]:
    with WebServer(ranges=False) as server:
        yield server


@pytest.fixture(scope="module")
def bare() -> Iterator[WebServer]:
    with WebServer(ranges=False, head=False, lengths=False, preconditions=False, tags="none") as server:
        yield server


class _Files:
    """Creates the objects for the tests on the server."""

    def __init__(self, server: WebServer) -> None:
        self._server = server

    def put(self, key: str, data: bytes) -> None:
        self._server.put("/" + key.partition("/")[2], data)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._server.delete("/" + key.partition("/")[2])


class WebConformance(OriginConformance):
    writes = False
    largest_listing = 1_050  # a request for each object
    unsupported_names = frozenset(
        # A key is a URL. In it these are not the names of files but: encoded characters, a query, a fragment.
        {"per%cent %41", "hash#tag?query", "in%2Fdecoy", "%64ecoy", "decoy?", "decoy?versionId=1"}
    )
    secrets = ("planted-password", "planted-cookie")

    @pytest.fixture
    def server(self, with_ranges: WebServer) -> WebServer:
        return with_ranges

    @pytest.fixture
    def origin(self, server: WebServer) -> Origin:
        return open_origin("http", {"auth": ("user", "planted-password"), "cookies": {"session": "planted-cookie"}})

    @pytest.fixture
    def root(self, server: WebServer, tmp_path: Path) -> str:
        return f"{server.host}{tmp_path}"

    @pytest.fixture
    def contents(self, server: WebServer) -> _Files:
        return _Files(server)


class TestServerWithRanges(WebConformance):
    pass


class TestServerWithoutRanges(WebConformance):
    @pytest.fixture
    def server(self, without_ranges: WebServer) -> WebServer:
        return without_ranges


class TestServerWithoutRangesHeadLengthsAndTags(WebConformance):
    largest_listing = 20
    exact_versions = False  # those of the same second and size are one

    @pytest.fixture
    def server(self, bare: WebServer) -> WebServer:
        return bare

    def test_read_of_removed_version_raises(self, origin: Origin, contents: Contents, root: str) -> None:
        """`head` has read the whole object for its size, so that version stays readable for a while."""
        contents.put(f"{root}/object", b"here")
        info = origin.head(f"{root}/object")
        contents.delete([info.key])
        assert bytes(origin.read(info.key, 0, 4, version=info.version)) == b"here"
        with pytest.raises(ObjectNotFoundError):
            origin.read(info.key, 0, 4)
