"""The limits over the origins that read `Retry-After` themselves: web servers and the hub's interface."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.http_service import Reply
from tests.support.hub_server import HubServer
from tests.support.web_server import WebServer

from millrace.errors import OriginBusyError
from millrace.events import Event
from millrace.origin import open_origin


@pytest.fixture
def server() -> Iterator[WebServer]:
    with WebServer() as running:
        running.put("/x.bin", b"content")
        yield running


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_of_a_web_server_is_kept(server: WebServer, tmp_path: Path, events: list[Event], form: str) -> None:
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path)})
    asked_at: list[float] = []

    def busy(*_: object) -> Reply:
        asked_at.append(time.time())
        header = "1" if form == "seconds" else email.utils.formatdate(int(asked_at[0]) + 2, usegmt=True)
        return Reply(status=429, headers={"Retry-After": header})

    server.service.interfere(busy, count=1)
    assert bytes(origin.read(f"{server.host}/x.bin", 0, 7)) == b"content"
    assert time.time() - asked_at[0] >= (1.0 if form == "seconds" else int(asked_at[0]) + 2 - asked_at[0]) - 0.01
    assert len(server.requests) == 2  # no other request meanwhile, and none for the header, which was there
    assert [event.name for event in events if event.name.startswith("origin.gate")] == [
        "origin.gate.closed",
        "origin.gate.opened",
    ]


def test_busy_web_server_does_not_close_the_gate_of_another(server: WebServer, tmp_path: Path) -> None:
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path)})
    server.service.interfere(lambda *_: Reply(status=503, headers={"Retry-After": "600"}))
    with pytest.raises(OriginBusyError, match=r"pause of [56].. s more"):
        origin.head(f"{server.host}/x.bin")
    with WebServer() as other:
        other.put("/y.bin", b"else")
        assert bytes(origin.read(f"{other.host}/y.bin", 0, 4)) == b"else"
    sent = len(server.requests)
    with pytest.raises(OriginBusyError):
        origin.read(f"{server.host}/x.bin", 0, 1)
    assert len(server.requests) == sent


def test_retry_after_of_the_hub_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")
    with HubServer() as hub:
        hub.commit("datasets", "u/r", {"x.bin": b"content"})
        origin = open_origin("hf", {"endpoint": hub.url}, {"cache_dir": str(tmp_path)})
        asked_at: list[float] = []

        def busy(*_: object) -> Reply:
            asked_at.append(time.monotonic())
            return Reply(status=429, headers={"Retry-After": "1"})

        hub.service.interfere(busy, count=1)
        assert bytes(origin.read("datasets/u/r/x.bin", 0, 7)) == b"content"
        assert time.monotonic() - asked_at[0] >= 1.0


def test_query_of_a_url_is_never_shown(
    server: WebServer, tmp_path: Path, events: list[Event], caplog: pytest.LogCaptureFixture
) -> None:
    """The query may be a signature. Neither an error nor an event shows it, also after a redirect to another server."""
    origin = open_origin("http", {}, {"cache_dir": str(tmp_path)})
    with WebServer() as other:
        other.service.interfere(lambda *_: Reply(status=429, headers={"Retry-After": "600"}))
        server.redirect("/moved.bin", f"{other.url}/x.bin?signature=planted2")
        for key in (f"{server.host}/moved.bin?signature=planted1", f"{other.host}/x.bin?signature=planted1"):
            for _ in range(2):  # refused by the server, and by the gate
                with pytest.raises(OriginBusyError, match=r"\.bin\?\.\.\.: the origin requests a lower rate") as caught:
                    origin.read(key, 0, 7)
                reported = [repr(each) for each in (caught.value, caught.value.__cause__)]
                assert "planted" not in "".join(reported)
    assert "origin.request.failed" in [event.name for event in events]
    assert "planted" not in repr(events)
    assert "planted" not in caplog.text
    assert "planted" not in "".join(str(path) for path in tmp_path.rglob("*"))
