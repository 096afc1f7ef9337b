"""The process that encodes chunks for one manager (`encoder_process`): `python -m millrace.checkpoint.writing.encoder_main`.

It reads tensors and writes stored chunks in shared memory, without storage or torch. It ends when its parent ends, for
whatever reason, and when its socket is closed.
"""

from __future__ import annotations

import mmap
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from typing import NamedTuple

import numpy as np

from millrace.checkpoint.codec.chunks import Array, Effort, Kind, checksum
from millrace.checkpoint.codec.registry import ChunkCodec
from millrace.checkpoint.writing.chunk_forms import BaseChunk, Chain, EncodeHooks, Form, form_of
from millrace.checkpoint.writing.encoder_protocol import (
    HEADER,
    REQUEST,
    RESULT,
    SLOT_BYTES,
    EncodeRequest,
    EncodeResult,
    MessageHeader,
    MessageType,
    ResultKind,
    Stream,
    gathered,
)


class _EncodeTask(NamedTuple):
    """A request with its memory, which keeps the mapping alive after `MessageType.FORGET`."""

    ticket: int
    request: EncodeRequest
    region: Array
    base: Array | None
    pieces: Array


class _Encoder:
    """Receives messages, encodes chunks in several threads, and sends the results."""

    def __init__(self, connection: socket.socket, threads: int) -> None:
        self._socket, self._stream = connection, Stream(connection)
        self._regions: dict[int, Array] = {}
        self._slots = np.empty(0, dtype=np.uint8)
        self._tasks: queue.SimpleQueue[_EncodeTask] = queue.SimpleQueue()
        self._sending = threading.Lock()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"millrace-encoder-{number}", daemon=True).start()

    def serve(self) -> None:
        """Handle messages until the parent closes the socket. Then raises `EOFError` or `OSError`."""
        while True:
            header = MessageHeader._make(HEADER.unpack(self._stream.read(HEADER.size)))
            if header.type == MessageType.REGION:
                self._regions[header.ticket] = self._mapped(header.nbytes, mmap.PROT_READ)
            elif header.type == MessageType.SLOTS:
                self._slots = self._mapped(header.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            elif header.type == MessageType.FORGET:
                self._regions.pop(header.ticket, None)
            else:
                self._tasks.put(self._task(header.ticket, self._stream.read(header.nbytes)))

    def _mapped(self, nbytes: int, protection: int) -> Array:
        descriptor = self._stream.descriptors.popleft()
        try:
            return np.frombuffer(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, protection), dtype=np.uint8)
        finally:
            os.close(descriptor)

    def _task(self, ticket: int, data: bytes) -> _EncodeTask:
        request = EncodeRequest._make(REQUEST.unpack_from(data))
        pieces = np.frombuffer(data, dtype=np.int64, offset=REQUEST.size).reshape(-1, request.pieces)
        base = self._regions[request.base_region] if request.has_base else None
        return _EncodeTask(ticket, request, self._regions[request.region], base, pieces)

    def _work(self) -> None:
        try:
            self._work_on()
        except BaseException:  # noqa: BLE001 - a defect, or no memory
            traceback.print_exc()
        finally:  # the parent waits for results: the process ends, so that the parent encodes in its own threads
            os._exit(0)

    def _work_on(self) -> None:
        codec = ChunkCodec()
        while True:
            task = self._tasks.get()
            try:
                result = self._encode(codec, task)
            except Exception:  # noqa: BLE001 - the parent encodes the chunk, and raises the error if it happens again
                traceback.print_exc()
                result = EncodeResult(task.ticket, ResultKind.FAILED, False, 0, 0, 0, 0, 0.0, 0, 0.0)
            del task
            try:
                with self._sending:
                    self._socket.sendall(RESULT.pack(*result))
            except OSError:
                return  # the parent has ended

    def _encode(self, codec: ChunkCodec, task: _EncodeTask) -> EncodeResult:
        request = task.request
        taken: list[tuple[int, float]] = []
        base_changed = False

        def read_base() -> Array | None:
            nonlocal base_changed
            if task.base is None:
                raise AssertionError("there is no base")
            values = gathered(task.base, task.pieces[2], task.pieces[1])
            base_changed = checksum(values.data) != request.base_checksum
            return None if base_changed else values

        base = None
        if request.has_base:
            chain = Chain(request.chain_bytes, request.root_bytes) if request.has_chain else None
            base = BaseChunk(raw_checksum=request.base_checksum, read=read_base, chain=chain, limit=request.limit)
        hooks = EncodeHooks(
            next_effort=lambda: Effort(request.effort),
            transform=lambda stored: stored,
            encoded=lambda effort, raw_bytes, stored_bytes, seconds: taken.append((stored_bytes, seconds)),
        )
        raw = gathered(task.region, task.pieces[0], task.pieces[1])
        form = form_of(codec, hooks, raw, Kind.from_code(request.kind), base)
        taken += [(0, 0.0)] * (2 - len(taken))
        nbytes = 0 if form.stored is None else len(form.stored)
        if form.stored is not None:
            if nbytes > SLOT_BYTES:
                raise ValueError(f"a stored chunk of {nbytes} bytes does not fit into {SLOT_BYTES}")
            start = request.slot * SLOT_BYTES
            self._slots[start : start + nbytes] = np.frombuffer(form.stored, dtype=np.uint8)
        return EncodeResult(
            task.ticket,
            _kind(form),
            base_changed,
            form.raw_checksum,
            form.stored_checksum,
            nbytes,
            *taken[0],
            *taken[1],
        )


def _kind(form: Form) -> ResultKind:
    if form.stored is None:
        return ResultKind.REFERENCE
    return ResultKind.DELTA if form.to_base else ResultKind.FULL


_PARENT_POLL_MILLISECONDS = 1000


def _end_with(parent: int) -> None:
    """End this process when `parent` ends: a child of the parent may still have the other end of the socket open."""
    poll = select.poll()
    milliseconds: int | None = None
    try:
        poll.register(os.pidfd_open(parent), select.POLLIN)
    except ProcessLookupError:
        os._exit(0)
    except OSError:
        # Containers may forbid the call. Then poll: after the end of the parent, the parent's pid is a different one.
        milliseconds = _PARENT_POLL_MILLISECONDS
    while os.getppid() == parent and not poll.poll(milliseconds):
        continue
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Run with `descriptor parent threads niceness`: the socket, the parent's pid, the codec threads, and the priority."""
    # The parent handles Ctrl-C: it may wait for a save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, parent, threads, niceness = map(int, arguments)
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    threading.Thread(target=_end_with, args=(parent,), name="millrace-parent", daemon=True).start()
    try:
        _Encoder(socket.socket(fileno=descriptor), threads).serve()
    except (EOFError, OSError):
        # `exit` could wait for a thread in the middle of a chunk.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
