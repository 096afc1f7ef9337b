"""The Hugging Face hub's stand-in passes the conformance suite, as far as a read-only storage with immutable commits can."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.support.hub_server import HubServer

from millrace.errors import ObjectNotFoundError
from millrace.origin import Origin, open_origin
from millrace.testing.conformance import OriginConformance
from millrace.testing.conformance.origin import Contents, FromEnvironment

_TOKEN = "hf_plantedPlantedPlanted"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer(tokens=[_TOKEN], large_bytes=1000) as server:
        yield server


class _Files:
    """Creates the objects for the tests, each with a commit."""

    def __init__(self, hub: HubServer) -> None:
        self._hub = hub

    def put(self, key: str, data: bytes) -> None:
        kind, owner, name, path = key.split("/", 3)
        self._hub.commit(kind, f"{owner}/{name}", {path: data})

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            kind, owner, name, path = key.split("/", 3)
            self._hub.commit(kind, f"{owner}/{name}", {path: None})


class TestHubOrigin(OriginConformance):
    writes = False
    secrets = (_TOKEN,)
    largest_listing = 1_050

    @pytest.fixture
    def origin(self, hub: HubServer) -> Origin:
        return open_origin("hf", {"endpoint": hub.url, "token": _TOKEN})

    @pytest.fixture
    def environment_origin(self, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> FromEnvironment:
        monkeypatch.setenv("HF_TOKEN", _TOKEN)
        return FromEnvironment(open_origin("hf", {"endpoint": hub.url}), (_TOKEN,))

    @pytest.fixture
    def root(self, tmp_path: Path) -> str:
        name = "".join(char if char.isalnum() else "-" for char in tmp_path.name)
        return f"datasets/user/{tmp_path.parent.name}-{name}"[:90].rstrip("-") + "/root"

    @pytest.fixture
    def contents(self, hub: HubServer) -> _Files:
        return _Files(hub)

    def test_replaced_object_gets_another_version_and_all_new_bytes(
        self, origin: Origin, contents: Contents, root: str
    ) -> None:
        """A reader of the earlier version continues to read it, from the commit that has it."""
        contents.put(f"{root}/object", b"first")
        first = origin.head(f"{root}/object")
        contents.put(f"{root}/object", b"the second")
        second = origin.head(f"{root}/object")
        assert first.version != second.version
        assert bytes(origin.read(second.key, 0, second.size, version=second.version)) == b"the second"
        assert bytes(origin.read(first.key, 0, first.size, version=first.version)) == b"first"

    def test_read_of_removed_version_raises(self, origin: Origin, contents: Contents, root: str) -> None:
        contents.put(f"{root}/object", b"here")
        info = origin.head(f"{root}/object")
        contents.delete([info.key])
        assert bytes(origin.read(info.key, 0, 4, version=info.version)) == b"here"
        with pytest.raises(ObjectNotFoundError):
            origin.head(info.key)
