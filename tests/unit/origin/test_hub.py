"""The hub's origin: names, pinned commits, versions by content, tokens, and its requests."""

import importlib.util
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_service import Reply, Request
from tests.support.hub_server import HubServer

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.hub import HubOrigin
from millrace.origin.hub.client import Entry
from millrace.origin.hub.hub_origin import walk_tree
from millrace.origin.hub.names import Repository, file_url, parse_name
from millrace.origin.hub.options import find_token, hub_options
from millrace.origin.web import connections

LARGE = bytes(i * 11 % 256 for i in range(50_000))
REPO = "datasets/user/things"
TOKEN = "hf_planted"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(tokens=[TOKEN]) as hub:
        hub.commit("datasets", "user/things", {"small.txt": b"small", "data/large.bin": LARGE})
        yield hub


@pytest.fixture
def origin(hub: HubServer) -> HubOrigin:
    return HubOrigin("hf", {"endpoint": hub.url})


def _read(origin: HubOrigin, key: str, version: str | None = None) -> bytes:
    return bytes(origin.read(key, 0, origin.head(key).size, version=version))


# --- names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "kind", "name", "revision", "path"),
    [
        ("datasets/u/r/a/b.parquet", "datasets", "u/r", "main", "a/b.parquet"),
        ("datasets/u/r", "datasets", "u/r", "main", ""),
        ("u/r/config.json", "models", "u/r", "main", "config.json"),
        ("models/u/r/config.json", "models", "u/r", "main", "config.json"),
        ("spaces/u/r/app.py", "spaces", "u/r", "main", "app.py"),
        ("datasets/u/r@v1.0/x", "datasets", "u/r", "v1.0", "x"),
        ("datasets/u/r@feature%2Fx/y", "datasets", "u/r", "feature/x", "y"),
        ("datasets/u/r@refs/pr/12/y/z", "datasets", "u/r", "refs/pr/12", "y/z"),
        ("datasets/u/r@refs%2Fpr%2F12/y", "datasets", "u/r", "refs/pr/12", "y"),
        ("datasets/u/r@refs/convert/parquet/y", "datasets", "u/r", "refs/convert/parquet", "y"),
        ("datasets/u/r@refs/convert/parquet", "datasets", "u/r", "refs/convert/parquet", ""),
        ("datasets/u/r/a@b/c", "datasets", "u/r", "main", "a@b/c"),
        ("u/r@" + "a" * 40 + "/x", "models", "u/r", "a" * 40, "x"),
    ],
)
def test_keys_are_those_of_huggingface_hub(key: str, kind: str, name: str, revision: str, path: str) -> None:
    parsed = parse_name(key)
    assert (parsed.repository, parsed.revision, parsed.path) == (Repository(kind, name), revision, path)
    assert parsed.names_a_commit is (len(revision) == 40)
    if path:
        assert parsed.key(path) == key


@pytest.mark.parametrize(
    "key",
    ["", "datasets", "datasets/u", "single", "datasets/../r/x", "u/../x", "u/r/../x", "u/r/a//b", "u/r/./x", "u/r@/x",
     "u/r@../x", "u/r@%2e%2e%2fx/y", "u/r@a%00b/x", "u/r/a\nb", "u/r/\udc80", "u r/n/x", "u/..", "buckets/u/b/x",
     "kernels/u/k/x", "u/r@%zz%0a/x"],
)  # fmt: skip
def test_invalid_hub_name_is_refused_without_a_request(key: str) -> None:
    with pytest.raises((ObjectNotFoundError, UsageError)):
        parse_name(key)
    assert not HubOrigin("hf").is_immutable(key)


def test_file_url_with_special_characters_is_percent_encoded() -> None:
    url = file_url("https://h", Repository("datasets", "u/r"), "refs/pr/1", "a b/ü#?%.bin")
    assert url == "https://h/datasets/u/r/resolve/refs%2Fpr%2F1/a%20b/%C3%BC%23%3F%25.bin"


# --- commits --------------------------------------------------------------------------------------------


def test_only_a_full_commit_hash_is_immutable(hub: HubServer, origin: HubOrigin) -> None:
    commit = hub.repository("datasets", "user/things").branches["main"]
    assert origin.is_immutable(f"{REPO}@{commit}/small.txt")
    for revision in ("", "@main", f"@{commit[:39]}", "@refs/pr/1", f"@{commit.upper()}"):
        assert not origin.is_immutable(f"{REPO}{revision}/small.txt")
    assert hub.service.requests == []


def test_hub_name_is_parsed_once() -> None:
    assert parse_name("u/r@main/x") is parse_name("u/r@main/x")


def test_new_commit_changes_versions_of_changed_files_only(hub: HubServer, origin: HubOrigin) -> None:
    before = {name: origin.head(f"{REPO}/{name}") for name in ("small.txt", "data/large.bin")}
    hub.commit("datasets", "user/things", {"small.txt": b"other"})
    after = {name: origin.head(f"{REPO}/{name}") for name in before}
    assert after["data/large.bin"].version == before["data/large.bin"].version
    assert after["small.txt"].version != before["small.txt"].version


def test_listing_and_head_return_the_same_version(origin: HubOrigin) -> None:
    infos = [info for page in origin.list_all(REPO) for info in page]
    assert infos == [origin.head(info.key) for info in infos]
    assert [info.key for info in infos] == [f"{REPO}/data/large.bin", f"{REPO}/small.txt"]


@pytest.mark.parametrize("name", ["small.txt", "data/large.bin"])
def test_reader_continues_with_the_commit_of_its_open(hub: HubServer, origin: HubOrigin, name: str) -> None:
    old = origin.head(f"{REPO}/{name}")
    data = _read(origin, old.key, old.version)
    hub.commit("datasets", "user/things", {name: data[::-1]})
    # Without a word of the new commit, and after it was seen.
    assert bytes(origin.read(old.key, 0, old.size, version=old.version)) == data
    assert _read(origin, old.key) == data[::-1]
    assert bytes(origin.read(old.key, 0, old.size, version=old.version)) == data


@pytest.mark.parametrize("name", ["small.txt", "data/large.bin"])
def test_unpickled_hub_origin_reads_the_newest_or_the_named_version(
    hub: HubServer, origin: HubOrigin, name: str
) -> None:
    old = origin.head(f"{REPO}/{name}")
    data = _read(origin, old.key)
    other = pickle.loads(pickle.dumps(origin))
    late = pickle.loads(pickle.dumps(origin))
    assert bytes(other.read(old.key, 0, old.size, version=old.version)) == data  # with the version from a cache
    hub.commit("datasets", "user/things", {name: data[::-1]})
    new = origin.head(old.key)
    assert bytes(other.read(new.key, 0, new.size, version=new.version)) == data[::-1]  # its pin was older
    with pytest.raises(ObjectChangedError):
        late.read(old.key, 0, old.size, version=old.version)
    assert bytes(late.read(old.key, 0, 5)) == data[::-1][:5]


def test_reads_without_new_request_are_of_one_commit(hub: HubServer, origin: HubOrigin) -> None:
    assert bytes(origin.read(f"{REPO}/small.txt", 0, 5)) == b"small"
    hub.commit("datasets", "user/things", {"small.txt": b"other"})
    assert bytes(origin.read(f"{REPO}/small.txt", 0, 5)) == b"small"
    origin.list_level(REPO)
    assert bytes(origin.read(f"{REPO}/small.txt", 0, 5)) == b"other"


def test_file_with_same_content_after_squash_is_readable(hub: HubServer, origin: HubOrigin) -> None:
    info = origin.head(f"{REPO}/small.txt")
    hub.squash("datasets", "user/things")
    assert bytes(origin.read(info.key, 0, info.size, version=info.version)) == b"small"


def test_branches_tags_and_pull_requests_are_resolved(hub: HubServer, origin: HubOrigin) -> None:
    main = hub.repository("datasets", "user/things").branches["main"]
    pull = hub.commit("datasets", "user/things", {"small.txt": b"pull"}, branch="refs/pr/1", parent=main)
    hub.commit("datasets", "user/things", {"small.txt": b"feat"}, branch="feature/x", parent=main)
    expected = {"": b"small", "@refs/pr/1": b"pull", "@refs%2Fpr%2F1": b"pull", "@feature%2Fx": b"feat"}
    expected |= {f"@{main}": b"small", f"@{pull}": b"pull"}
    assert {at: _read(origin, f"{REPO}{at}/small.txt") for at in expected} == expected
    for at in expected:
        assert origin.list_level(f"{REPO}{at}").objects[0].key == f"{REPO}{at}/small.txt"
    with pytest.raises(ObjectNotFoundError, match="branch"):
        origin.head(f"{REPO}@nowhere/small.txt")


def test_renamed_repository_is_followed(hub: HubServer, origin: HubOrigin) -> None:
    hub.rename("datasets", "user/things", "user/renamed")
    assert _read(origin, f"{REPO}/data/large.bin") == LARGE
    assert [info.key for page in origin.list_all(REPO) for info in page][-1] == f"{REPO}/small.txt"


# --- requests -------------------------------------------------------------------------------------------


def test_large_file_costs_the_hub_one_request(hub: HubServer, origin: HubOrigin) -> None:
    info = origin.head(f"{REPO}/data/large.bin")
    hub.service.requests.clear()
    for start in range(0, 50_000, 5_000):
        data = origin.read(info.key, start, start + 5_000, version=info.version)
        assert bytes(data) == LARGE[start : start + 5_000]
    assert len(hub.service.requests) == 1
    assert len(hub.cdn.requests) == 10


def test_connections_are_kept_over_redirects_and_refusals(
    hub: HubServer, origin: HubOrigin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_DRAIN_SECONDS", 120.0)  # a busy machine may take long between two lines
    for name in ("small.txt", "data/large.bin", "none"):
        for _ in range(5):
            hub.expire_addresses()
            try:
                origin.read(f"{REPO}/{name}", 0, 5)
            except ObjectNotFoundError:
                assert name == "none"
    assert len(hub.service.requests) > 15
    assert hub.service.connections_made == 1


def test_files_of_a_commit_need_no_lookup(hub: HubServer, origin: HubOrigin) -> None:
    commit = hub.repository("datasets", "user/things").branches["main"]
    origin.read(f"{REPO}@{commit}/small.txt", 0, 5)
    assert hub.service.count("GET", f"/revision/{commit}") == 0
    assert all(commit in request.path for request in hub.service.requests)


def test_expired_address_is_requested_again(hub: HubServer, origin: HubOrigin) -> None:
    info = origin.head(f"{REPO}/data/large.bin")
    for _ in range(3):
        assert bytes(origin.read(info.key, 7, 9, version=info.version)) == LARGE[7:9]
        hub.expire_addresses()
    hub.address_seconds = -1
    with pytest.raises(OriginUnavailableError) as caught:
        origin.read(info.key, 7, 9, version=info.version)
    assert "Signature" not in str(caught.value)


def test_failed_server_of_large_files_is_left_for_another(hub: HubServer, origin: HubOrigin) -> None:
    info = origin.head(f"{REPO}/data/large.bin")
    with HubServer() as other:
        other.commit("datasets", "user/things", {"data/large.bin": LARGE})
        location = other._signed(info.version)

        def elsewhere(request: Request, reply: Reply) -> Reply | None:
            return replace(reply, headers={**reply.headers, "Location": location}) if reply.status == 302 else None

        hub.service.interfere(elsewhere)
        assert bytes(origin.read(info.key, 0, 9, version=info.version)) == LARGE[:9]
    hub.service.leave_alone()
    with pytest.raises(OriginUnavailableError):
        origin.read(info.key, 9, 18, version=info.version)
    assert bytes(origin.read(info.key, 9, 18, version=info.version)) == LARGE[9:18]


@pytest.mark.parametrize("name", ["small.txt", "data/large.bin"])
@pytest.mark.parametrize(
    "change",
    [
        {"stop_after": 2},
        {"stop_after": 0, "reset": True},
        {"status": 500},
        {"headers": {"Content-Range": "bytes 0-2/5"}},
        {"headers": {}, "body": b"x"},
    ],
)
def test_wrong_range_is_an_error_and_the_next_read_succeeds(
    hub: HubServer, origin: HubOrigin, name: str, change: dict[str, Any]
) -> None:
    info = origin.head(f"{REPO}/{name}")
    service = hub.service if name == "small.txt" else hub.cdn
    service.interfere(
        lambda request, reply: (
            replace(reply, **{**change, "headers": {**reply.headers, **change.get("headers", {})}})
            if reply.status == 206
            else None
        ),
        count=1,
    )
    with pytest.raises(OriginUnavailableError):
        origin.read(info.key, 1, 4, version=info.version)
    assert bytes(origin.read(info.key, 1, 4, version=info.version)) == (LARGE if service is hub.cdn else b"small")[1:4]


def test_hub_range_past_the_end_raises(hub: HubServer, origin: HubOrigin) -> None:
    for name, size in (("small.txt", 5), ("data/large.bin", 50_000)):
        for start, stop in ((0, size + 1), (size, size + 1), (size + 5, size + 9)):
            with pytest.raises(UsageError):
                origin.read(f"{REPO}/{name}", start, stop)


def test_busy_hub_is_retried_after_its_pause(hub: HubServer, origin: HubOrigin) -> None:
    hub.service.interfere(lambda request, reply: Reply(status=429, headers={"RateLimit": '"api";r=0;t=55'}))
    for call in (
        lambda: origin.head(f"{REPO}/x"),
        lambda: origin.read(f"{REPO}/x", 0, 1),
        lambda: origin.list_level(REPO),
    ):
        with pytest.raises(OriginBusyError) as caught:
            call()
        assert caught.value.retry_after == 55.0
    assert len(hub.service.requests) == 3


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"sha": "main"}', b'{"sha": 5}', b"[{}]", b"5"])
def test_server_that_is_not_a_hub_raises(hub: HubServer, origin: HubOrigin, body: bytes) -> None:
    hub.service.interfere(lambda request, reply: Reply(body=body))
    for call in (
        lambda: origin.head(f"{REPO}/x"),
        lambda: origin.read(f"{REPO}/x", 0, 1),
        lambda: origin.list_level(REPO),
    ):
        with pytest.raises(OriginUnavailableError):
            call()


# --- listings -------------------------------------------------------------------------------------------


def test_list_level_of_repository_returns_files_and_directories(hub: HubServer, origin: HubOrigin) -> None:
    listing = origin.list_level(REPO)
    assert [info.key for info in listing.objects] == [f"{REPO}/small.txt"]
    assert list(listing.prefixes) == [f"{REPO}/data"]
    assert listing.is_directory
    for nothing in (f"{REPO}/none", f"{REPO}/small.txt"):
        listing = origin.list_level(nothing)
        assert not listing.objects
        assert not listing.prefixes
        assert not listing.is_directory
        assert [info for page in origin.list_all(nothing) for info in page] == []
    with pytest.raises(MillraceError):
        origin.list_level("datasets/user/nothing")


@pytest.mark.parametrize("most_at_once", [0, 3, 5, 1000])
def test_list_all_of_large_tree_is_in_path_order(most_at_once: int) -> None:
    paths = sorted(["a", "b/1", "b/2", "b/c/d", "b-x", "b0", "c/a", "c/b", "z", "ü"])

    def pages(path: str, recursive: bool) -> Iterator[Sequence[Entry]]:
        below = f"{path}/" if path else ""
        files = [each for each in paths if each.startswith(below)]
        folders = {each[:at] for each in files for at in range(len(below), len(each)) if each[at] == "/"}
        entries = [Entry(each, 0, None) for each in folders] + [Entry(each, 1, "v") for each in reversed(files)]
        if not recursive:
            entries = [each for each in entries if "/" not in each.path[len(below) :]]
        for start in range(0, len(entries), 2):
            yield entries[start : start + 2]

    assert [entry.path for entry in walk_tree(pages, "", "", most_at_once)] == paths
    for number, after in enumerate(paths):
        assert [entry.path for entry in walk_tree(pages, "", after, most_at_once)] == paths[number + 1 :]


def test_list_all_of_many_pages_returns_all_files(origin: HubOrigin, hub: HubServer) -> None:
    hub.page_size = 7
    hub.commit("models", "user/many", {f"{number % 5}/{number:03}": b"x" for number in range(100)})
    found = [info.key for page in origin.list_all("user/many") for info in page]
    assert found == sorted(f"user/many/{number % 5}/{number:03}" for number in range(100))


def test_listing_that_repeats_a_page_ends(origin: HubOrigin, hub: HubServer) -> None:
    """As behind a proxy that ignores queries."""
    hub.page_size = 1
    first: list[Reply] = []

    def repeat(request: Request, reply: Reply) -> Reply:
        if "/tree/" in request.path:
            first.append(reply)
            reply = first[0]
        assert len(first) < 10
        return reply

    hub.service.interfere(repeat)
    with pytest.raises(OriginUnavailableError, match="does not respond as a Hugging Face hub"):
        origin.list_level(f"{REPO}/")


# --- tokens ---------------------------------------------------------------------------------------------


def test_token_of_private_repository_is_sent_only_to_the_hub(hub: HubServer, origin: HubOrigin) -> None:
    hub.repository("datasets", "user/things").private = True
    for call in (
        lambda: origin.head(f"{REPO}/small.txt"),
        lambda: origin.read(f"{REPO}/small.txt", 0, 1),
        lambda: origin.list_level(REPO),
    ):
        with pytest.raises(DeniedError, match="HF_TOKEN"):
            call()
    admitted = HubOrigin("hf", {"endpoint": hub.url, "token": TOKEN})
    assert admitted.identity == origin.identity
    assert _read(admitted, f"{REPO}/data/large.bin") == LARGE
    assert TOKEN in str(hub.service.requests[-1].headers)
    assert hub.cdn.requests
    assert all("authorization" not in request.headers for request in hub.cdn.requests)
    assert TOKEN not in repr(admitted)
    wrong = HubOrigin("hf", {"endpoint": hub.url, "token": "hf_wrong"})
    with pytest.raises(DeniedError) as caught:
        wrong.head(f"{REPO}/small.txt")
    assert "hf_wrong" not in str(caught.value)


def test_gated_repository_raises_with_the_next_step(hub: HubServer, origin: HubOrigin) -> None:
    hub.repository("datasets", "user/things").gated = True
    with pytest.raises(DeniedError, match="accept its conditions"):
        origin.head(f"{REPO}/small.txt")


def test_missing_repository_with_token_is_not_found(hub: HubServer) -> None:
    admitted = HubOrigin("hf", {"endpoint": hub.url, "token": TOKEN})
    with pytest.raises(ObjectNotFoundError, match="no such repository"):
        admitted.head("datasets/user/nothing/x")


@pytest.mark.parametrize("installed", [True, False])
def test_hub_token_is_found_in_its_usual_places(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if installed:
        # Its module looks at the environment once, when it is imported.
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    environ = {"HF_HOME": str(tmp_path)}
    assert find_token(None, environ) is None
    with pytest.raises(DeniedError):
        find_token(True, environ)
    (tmp_path / "token").write_text("hf_file\n")
    assert find_token(None, environ) == "hf_file"
    assert find_token(True, {**environ, "HF_TOKEN": " hf_env "}) == "hf_env"
    assert find_token("hf_given", {**environ, "HF_TOKEN": "hf_env"}) == "hf_given"
    assert find_token(False, environ) is None
    assert find_token(None, {**environ, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}) is None


def test_hub_token_of_environment_is_not_pickled_and_is_renewed(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repository("datasets", "user/things").private = True
    monkeypatch.delenv("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    origin = HubOrigin("hf", {"endpoint": hub.url})
    info = origin.head(f"{REPO}/small.txt")
    assert TOKEN.encode() not in pickle.dumps(origin)
    hub.tokens = {"hf_renewed"}
    with pytest.raises(DeniedError):
        origin.read(info.key, 0, 5, version=info.version)
    monkeypatch.setenv("HF_TOKEN", "hf_renewed")
    assert bytes(origin.read(info.key, 0, 5, version=info.version)) == b"small"


@pytest.mark.parametrize(
    "options",
    [
        {"revision": "planted"},
        {"token": ""},
        {"token": "plan ted"},
        {"token": 5},
        {"endpoint": "planted"},
        {"endpoint": "ftp://planted"},
        {"endpoint": "https://u:planted@host"},
        {"endpoint": "https://host/?x=planted"},
    ],
)
def test_invalid_option_raises_without_its_value(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        HubOrigin("hf", options)
    assert "planted" not in str(caught.value)


def test_hub_identity_is_its_endpoint() -> None:
    assert HubOrigin("hf").identity == "hf+https://huggingface.co"
    assert hub_options({}, {"HF_ENDPOINT": "https://Hub.example/"}).endpoint == "https://hub.example"
    assert hub_options({"endpoint": "https://h/sub/"}, {"HF_ENDPOINT": "https://x"}).endpoint == "https://h/sub"
    assert hub_options({"block_size": 5, "expand_info": True}, {}) == hub_options({}, {})


def test_forked_child_has_the_commits_of_its_parent(hub: HubServer, origin: HubOrigin) -> None:
    old = origin.head(f"{REPO}/small.txt")
    hub.commit("datasets", "user/things", {"small.txt": b"other"})
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write, json.dumps(bytes(origin.read(old.key, 0, 5, version=old.version)).decode()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert pipe.read() == b'"small"'
    os.waitpid(pid, 0)
