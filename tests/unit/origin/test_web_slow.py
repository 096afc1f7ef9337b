"""Servers that send correct bytes too slowly, or lie about their length."""

from __future__ import annotations

import gzip
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.errors import OriginUnavailableError, UsageError
from millrace.origin import open_origin
from millrace.origin.limits import retry_after
from millrace.origin.web import connections

BODY = b"0123456789" * 100


@contextmanager
def serving(answer: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A server whose connections are each answered by `answer`, which ends when the event is set."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=respond, args=(connection,), daemon=True).start()

        def respond(connection: socket.socket) -> None:
            with connection:
                try:
                    connection.recv(65536)
                    answer(connection, ended)
                except OSError:
                    pass  # the client closed it

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}/x"
        finally:
            ended.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def dripping_head(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
    while not ended.wait(0.2):
        connection.sendall(b"x")


def endless_continue(connection: socket.socket, ended: threading.Event) -> None:
    while not ended.wait(0.2):
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def dripping_body(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nETag: "1"\r\n\r\n')
    while not ended.wait(0.2):
        connection.sendall(b"x")


def endless_chunks(connection: socket.socket, ended: threading.Event) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: "1"\r\n\r\n')
    while not ended.wait(0.01):
        connection.sendall(b"400\r\n" + bytes(1024) + b"\r\n")


@pytest.mark.parametrize("answer", [dripping_head, endless_continue, dripping_body, endless_chunks])
def test_slow_response_ends_within_the_timeout(answer: Callable[[socket.socket, threading.Event], None]) -> None:
    """The servers would send without end. The test's own time limit is the one of all tests."""
    with serving(answer) as url:
        origin = open_origin("http", {}, limits={"timeout": "3s"})
        with pytest.raises(OriginUnavailableError):
            origin.read(url, 0, 1000, version=None)


def test_request_for_the_pause_of_a_busy_origin_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a slot of the node, and its server would send for ever."""
    monkeypatch.setattr(retry_after, "_SECONDS", 0.5)
    with serving(dripping_head) as url:
        origin: Any = SimpleNamespace(signed_url=lambda key: f"http://{url}")
        assert retry_after.request_retry_after(origin, "bucket/key") is None


@pytest.mark.parametrize("length", ["abc", "-5", "10, 1000", str(1 << 63), "1000.0"])
def test_response_with_invalid_length_is_not_taken_as_the_object(length: str) -> None:
    def answer(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode() + BODY)

    with serving(answer) as url:
        origin = open_origin("http", {}, limits={"timeout": "1s"})
        with pytest.raises(OriginUnavailableError):
            origin.head(url)


def test_body_in_another_transfer_coding_is_not_taken_as_the_object() -> None:
    def answer(connection: socket.socket, _: threading.Event) -> None:
        body = gzip.compress(BODY)
        head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"
        connection.sendall(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))

    with serving(answer) as url:
        origin = open_origin("http", {}, limits={"timeout": "120s"})
        with pytest.raises(UsageError, match="gzip, chunked"):
            origin.read(url, 0, 10, version=None)


def test_forked_child_does_not_shut_down_connections_of_its_parent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        connections._heads[ours] = time.monotonic() + 3600
        try:
            child = os.fork()
            if not child:
                # Late in the child only: a thread of an earlier test may look in the parent.
                time.monotonic = lambda: math.inf
                os._exit(int(connections._shut_down_late_heads()))
            assert os.waitpid(child, 0)[1] == 0
        finally:
            del connections._heads[ours]
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
