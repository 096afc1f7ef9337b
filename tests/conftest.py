"""Fixtures that every kind of test shares."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import re
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from tests.support.azurite import AzuriteServer, find_azurite
from tests.support.chromium import find_chromium
from tests.support.etcd import EtcdServer, find_etcd
from tests.support.patience import patient
from tests.support.ports import reserved_port
from tests.support.prometheus import find_prometheus
from tests.support.seen_events import seen_events
from tests.support.small_disks import small_disk

from millrace.cache.node import close_nodes
from millrace.checkpoint.codec import splitting
from millrace.cluster.attach import close_all
from millrace.errors import MissingDependencyError
from millrace.events import Event
from millrace.filesystem import MillraceFileSystem, filesystem
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

_MANY_OBJECTS = 50_000
_number_of_bucket = itertools.count()
_number_of_home = itertools.count()

# No test is timed: the duration of an example depends on the load of the machine. The examples are the same in every run,
# so that a failure is that of the change; `make test-all ARGS=--hypothesis-profile=random` looks for new ones.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile("same")


@pytest.fixture(autouse=True, scope="session")
def _signals_count() -> None:
    """Under `nohup`, and in the background of a script, some are ignored, by the tests' own processes as well."""
    for number, handler in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(autouse=True, scope="session")
def _loops_of_numpy() -> None:
    """A worker that has coded 4 GiB in earlier tests would load numba in the middle of any test: 100 MB, and other files."""
    splitting.loops = splitting.Loops(from_bytes=1 << 62)


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the home of each test that writes to it."""
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, _homes: Path) -> Iterator[None]:
    """No test sees the user's configuration, or writes to the user's cache."""
    for name in list(os.environ):
        if name.startswith(("MILLRACE_", "AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST")):
            monkeypatch.delenv(name)
    home = _homes / str(next(_number_of_home))  # most tests leave it without a folder
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    yield
    if home.exists():
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _little_garbage() -> None:
    """Excludes existing objects, mostly of imported libraries, from the collection after every test."""
    if len(gc.get_objects()) > _MANY_OBJECTS:  # since the last full collection
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _closed_caches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test opens its caches itself. They are closed before the test's directory is removed."""
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("tmp_path")
    failed = request.session.testsfailed
    yield
    close_all()
    if request.session.testsfailed > failed:
        gc.collect()  # readers that a failed test left open still use the nodes
    close_nodes()


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all integration tests; every test uses a bucket of its own."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    """The server `s3` at a distance of 5 ms."""
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.005, bytes_per_second=None) as region:
        yield region


@pytest.fixture(scope="module")
def runs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """An S3 server of the module's own, with the bucket `runs`."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.create_bucket("runs")
        yield server


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for all tests that do not harm it; each uses a cluster's name of its own, and has the mark `etcd`."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd that the test may harm."""
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


@pytest.fixture(scope="session")
def azurite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzuriteServer]:
    """One server of Azure's interface for all tests with the mark `azurite`; every test uses a container of its own."""
    with AzuriteServer(tmp_path_factory.mktemp("azurite")) as server:
        yield server


@pytest.fixture
def container(azurite: AzuriteServer, tmp_path: Path) -> str:
    """A fresh container, named after the test."""
    name = _bucket_name(tmp_path)
    azurite.create_container(name)
    return name


@pytest.fixture
def bucket(s3: S3Server, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh bucket, named after the test."""
    name = _bucket_name(tmp_path)
    s3.create_bucket(name)
    return name


@pytest.fixture(scope="session")
def service_account_key() -> str:
    """A private key in PEM, as service accounts of Google have one."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem.decode()


def _bucket_name(directory: Path) -> str:
    """The directory's name in what S3 and Azure both allow: small letters, digits, and single hyphens between them.

    With a number: the next test may get a directory of the same name.
    """
    name = "-".join(("t-" + re.sub(r"[^a-z0-9]+", "-", directory.name.lower()))[:50].strip("-").split("--"))
    return f"{name}-{next(_number_of_bucket)}"


@pytest.fixture
def s3_options(s3: S3Server, tmp_path: Path) -> dict[str, Any]:
    """Arguments of `millrace.filesystem("s3", ...)` for a cache of the test's own."""
    return {"target_options": s3.target_options, "cache_dir": str(tmp_path / "cache"), "min_free": 0}


@pytest.fixture
def options(s3: S3Server, region: EmulatedRegion) -> dict[str, Any]:
    """Target options for `s3` through the emulated region."""
    return {**s3.target_options, "endpoint_url": region.endpoint_url}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., MillraceFileSystem]:
    """Makes file systems over local files, with a cache of the test's own."""

    def build(**options: object) -> MillraceFileSystem:
        return filesystem("file", **{"cache_dir": str(tmp_path / "cache"), "min_free": 0, **options})

    return build


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Every event of the test, as it comes."""
    with seen_events() as seen:
        yield seen


@pytest.fixture
def port() -> Iterator[int]:
    """Only a server of the test listens on it."""
    with reserved_port() as port:
        yield port


@pytest.fixture
def patient_peers() -> Iterator[None]:
    """For tests in which every peer responds, however busy the machine is."""
    with patient():
        yield


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collecting garbage: imports leave little, and each worker would search it for a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put them in order; those that need root, a server or a tool are listed as not run where there is none."""
    _slow_files_first(items)
    if os.geteuid() != 0:
        for item in items:
            if item.get_closest_marker("root"):
                item.add_marker(pytest.mark.skip(reason="needs root"))
    _skip_without(items, "etcd", "needs etcd", find_etcd)
    _skip_without(items, "azurite", "needs Azurite", find_azurite)
    _skip_without(items, "prometheus", "needs Prometheus", find_prometheus)
    _skip_without(items, "chromium", "needs Chromium", find_chromium)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the files with Ray to two workers: one has the jobs on machines of namespaces, the other the rest.

    These tests wait more than they work. More clusters on two cores would slow each other down until their deadlines pass.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class TwoWorkersForRay(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            if not _has_ray(config.rootpath / file):
                return file
            return "ray on machines" if file.startswith("tests/faults/") else "ray"

    return TwoWorkersForRay(config, log)


@functools.cache
def _has_ray(file: Path) -> bool:
    return "pytest.mark.ray" in file.read_text()


def _skip_without(items: list[pytest.Item], mark: str, reason: str, find: Callable[[], object]) -> None:
    """Have those with the mark be listed as not run, where what they need cannot be found."""
    marked = [item for item in items if item.get_closest_marker(mark)]
    try:
        if marked:
            find()
    except MissingDependencyError:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


_TESTS = Path(__file__).parent
_QUICK = ("unit", "conformance", "property")


def _slow_files_first(items: list[pytest.Item]) -> None:
    """Whole files: those with Ray, which keep one worker busy the longest, then the quick folders, then the slow files.

    Ray leaves threads behind: the quick folders run in the workers in which no Ray has run.
    """
    slow: dict[Path, int] = {}
    for item in items:
        slow[item.path] = slow.get(item.path, 0) + (item.get_closest_marker("slow") is not None)

    def key(item: pytest.Item) -> tuple[bool, bool, int]:
        quick = item.path.relative_to(_TESTS).parts[0] in _QUICK
        return not _has_ray(item.path), not quick, 0 if quick else -slow[item.path]

    items.sort(key=key)


@pytest.fixture(name="small_disk")
def _disk_of_10_mb(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small", "size=10m") as disk:
        yield disk
