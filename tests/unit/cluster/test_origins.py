"""The origins that a node reads for others: only the configured ones."""

import pytest
from tests.support.origins import MemoryOrigin

from millrace.cluster import origins as module
from millrace.cluster.origins import NamedOrigin, Origins
from millrace.errors import DeniedError
from millrace.origin import Origin, open_origin


def test_origins_find_registered_ones_only() -> None:
    memory = MemoryOrigin(identity="memory-1")
    origins = Origins([memory])
    assert origins.find("memory-1") is memory
    for identity in ("memory-2", "file", "file:///etc", "s3", "s3+", "s3+http://attacker:1", "gs+x", "", "\0"):
        assert origins.find(identity) is None
    other = MemoryOrigin(identity="memory-1")
    origins.register(other)
    assert origins.find("memory-1") is other


def test_origins_find_the_endpoint_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert Origins(environment=False).find("s3+http://127.0.0.1:9") is None
    origins = Origins()
    found = origins.find("s3+http://127.0.0.1:9")
    assert found is not None
    assert found.identity == "s3+http://127.0.0.1:9"
    assert origins.find("s3+http://127.0.0.1:9") is found
    assert origins.find("s3+http://127.0.0.1:10") is None
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@127.0.0.1:9")  # which cannot be used
    assert Origins().find("s3+http://127.0.0.1:9") is None


def test_origins_find_all_services_of_the_environment_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AZURE_STORAGE_CONNECTION_STRING",
        "AZURE_STORAGE_ENDPOINT",
        "STORAGE_EMULATOR_HOST",
        "GOOGLE_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    named = ["az+https://account.blob.core.windows.net", open_origin("gs").identity, "hf+http://127.0.0.1:9"]
    origins = Origins()
    assert [getattr(origins.find(identity), "identity", None) for identity in named] == named
    others = ["az+https://other.blob.core.windows.net", "gs+http://127.0.0.1:9", "hf+https://huggingface.co"]
    web = [
        "http",
        "https",
        "https+host",
        "fsspec-ftp+host=127.0.0.1",
        "fsspec-memory",
        "memory",
        "file",
        "local",
        "dir",
    ]
    assert [identity for identity in (*others, *web) if origins.find(identity) is not None] == []
    assert [identity for identity in named if Origins(environment=False).find(identity) is not None] == []


def test_origins_look_up_unknown_identities(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    known: dict[str, Origin] = {"a": MemoryOrigin(identity="a")}

    def lookup(identity: str) -> Origin | None:
        asked.append(identity)
        return known.get(identity)

    origins = Origins(lookup=lookup)
    assert [origins.find(name) for name in ("a", "a", "b", "b")] == [known["a"], known["a"], None, None]
    assert asked == ["a", "b"]  # an unknown identity is not looked up again at once
    origins.drop("a")
    assert origins.find("a") is known["a"]
    assert asked == ["a", "b", "a"]
    monkeypatch.setattr(module, "_MAX_UNKNOWN", 3)
    for number in range(20):
        origins.find(f"made-up-{number}")
    assert len(origins._unknown) <= 3


def test_named_origin_refuses_every_request() -> None:
    origin = NamedOrigin("s3+x")
    assert isinstance(origin, Origin)
    assert origin.identity == "s3+x"
    for call in (
        lambda: origin.head("k"),
        lambda: origin.read("k", 0, 1),
        lambda: origin.list_level("k"),
        lambda: origin.list_all("k"),
        lambda: origin.list_pages("k"),
        lambda: origin.put("k", b""),
        lambda: origin.open_writer("k"),
        lambda: origin.delete(["k"]),
    ):
        with pytest.raises(DeniedError, match="--origin"):
            call()
