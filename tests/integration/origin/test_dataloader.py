"""torch's DataLoader, its workers forked and spawned, over Azure, Google, the hub and the web: right bytes, fetched once.

Requests are counted at the server, or by a proxy in front of a server that does not count.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.support.azurite import AzuriteServer
from tests.support.gcs_server import GcsFront
from tests.support.hub_server import HubServer
from tests.support.identities import certificate, tls_context
from tests.support.web_server import WebServer

import millrace
from millrace.filesystem import MillraceFileSystem
from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset  # noqa: E402

# Of a worker's first use; two are large enough for the hub's other server.
_OBJECTS = {f"item-{number:02}.bin": os.urandom(1_000 if number % 6 else 40_000) for number in range(12)}

Item = tuple[str, bytes]


class Files(Dataset[Item]):
    """Opens a file an item: the file system of each, and its path."""

    def __init__(self, files: Sequence[tuple[MillraceFileSystem, str]]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Item:
        fs, path = self.files[index]
        with fs.open(path) as file:
            return path, file.read()


@dataclass(frozen=True)
class Place:
    """An origin with the objects below `root`, and how often their data was requested until now."""

    scheme: str
    root: str
    target_options: dict[str, Any]
    data_requests: Callable[[], int]

    def fs(self, directory: Path) -> MillraceFileSystem:
        """A file system that has read, so that its client is in use where the workers are forked."""
        fs = millrace.filesystem(
            self.scheme, target_options=self.target_options, cache_dir=str(directory / "cache"), min_free=0
        )
        assert fs.cat_file(f"{self.root}/first") == b"first"
        return fs

    def content(self) -> dict[str, bytes]:
        return {f"{self.root}/{name}": data for name, data in _OBJECTS.items()}


def _through(region: EmulatedRegion) -> Callable[[], int]:
    """No test here requests a listing, which would count as well."""
    return lambda: region.stats().by_method["GET"].requests


@pytest.fixture(scope="module")
def google(s3: S3Server) -> Iterator[Place]:
    s3.create_bucket("loader-gs")
    with GcsFront(s3) as front, EmulatedRegion(front.endpoint) as region:
        options = {"endpoint_url": region.endpoint_url, "token": front.token()}
        _put("gs", "loader-gs/dir", options)
        yield Place("gs", "loader-gs/dir", options, _through(region))


@pytest.fixture(scope="module")
def azure(azurite: AzuriteServer) -> Iterator[Place]:
    azurite.create_container("loader-az")
    address, _, account = azurite.endpoint.rpartition("/")
    with EmulatedRegion(address) as region:
        options = {**azurite.target_options, "account_host": f"{region.endpoint_url}/{account}"}
        _put("az", "loader-az/dir", options)
        yield Place("az", "loader-az/dir", options, _through(region))


@pytest.fixture(scope="module")
def hub() -> Iterator[Place]:
    with HubServer(large_bytes=10_000) as server:
        server.commit("datasets", "user/loader", {**_OBJECTS, "first": b"first"})

        def count() -> int:
            """A redirect, and what it leads to, count apart."""
            return server.service.count("GET", ".bin") + server.cdn.count("GET")

        yield Place("hf", "datasets/user/loader", {"endpoint": server.url}, count)


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    files = certificate(tmp_path_factory.mktemp("tls"))
    with WebServer(tls=tls_context(files)) as server:
        for name, data in {**_OBJECTS, "first": b"first"}.items():
            server.put(f"/dir/{name}", data)
        yield Place(
            "https", f"{server.host}/dir", {"verify": str(files[0])}, lambda: server.service.count("GET", ".bin")
        )


def _put(scheme: str, root: str, options: dict[str, Any]) -> None:
    origin = open_origin(scheme, options)
    for name, data in {**_OBJECTS, "first": b"first"}.items():
        origin.put(f"{root}/{name}", data)


def _loader(files: Sequence[tuple[MillraceFileSystem, str]], start: str) -> DataLoader[Item]:
    order = torch.Generator().manual_seed(5)
    return DataLoader(
        Files(files),
        shuffle=True,
        generator=order,
        batch_size=None,
        num_workers=2,
        multiprocessing_context=start,
    )


def assert_fetched_in_the_first_epoch_alone(places: Sequence[Place], start: str, directory: Path) -> None:
    """Two epochs of workers of their own each: all bytes right, and those of the second from the cache."""
    opened = [(place, place.fs(directory / place.scheme)) for place in places]
    files = [(fs, path) for place, fs in opened for path in place.content()]
    wanted = {path: data for place in places for path, data in place.content().items()}
    loader = _loader(files, start)
    before = [place.data_requests() for place in places]
    first = list(loader)
    asked = [place.data_requests() for place in places]
    second = list(loader)
    assert [len(epoch) for epoch in (first, second)] == [len(wanted), len(wanted)]
    assert dict(first) == wanted
    assert dict(second) == wanted
    # Else it would be something else that is counted.
    assert all(now - then >= len(_OBJECTS) for then, now in zip(before, asked, strict=True))
    assert [place.data_requests() for place in places] == asked


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than this machine has cores
@pytest.mark.parametrize("name", [pytest.param("azure", marks=pytest.mark.azurite), "google", "hub", "web"])
def test_forked_workers_read_right_bytes(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    assert_fetched_in_the_first_epoch_alone([request.getfixturevalue(name)], "fork", tmp_path)


@pytest.mark.slow
@pytest.mark.azurite
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_spawned_workers_read_right_bytes(azure: Place, google: Place, hub: Place, web: Place, tmp_path: Path) -> None:
    """All origins at once: starting such workers takes many seconds."""
    assert_fetched_in_the_first_epoch_alone([azure, google, hub, web], "spawn", tmp_path)
