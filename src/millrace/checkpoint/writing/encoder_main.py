"""The process that encodes chunks for one manager (`encoder_process`): `python -m millrace.checkpoint.writing.encoder_main`.

It reads tensors and writes stored chunks in shared memory, and knows neither storage nor torch. It ends with its parent,
however that ends, and with its socket.
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

from millrace.checkpoint.codec.planes import Array, Effort, Kind, PlaneCodec, checksum
from millrace.checkpoint.writing.chunk_forms import BaseChunk, Chain, Form, Setting, form_of
from millrace.checkpoint.writing.encoder_protocol import (
    ANSWER,
    HEAD,
    REQUEST,
    SLOT_BYTES,
    Answer,
    Head,
    Request,
    Say,
    Shape,
    Stream,
    gathered,
)


class _Job(NamedTuple):
    """A request with the memory that it is about, which may be forgotten meanwhile."""

    ticket: int
    request: Request
    region: Array
    base: Array | None
    pieces: Array


class _Encoder:
    """Takes messages, encodes with several threads, answers."""

    def __init__(self, connection: socket.socket, threads: int) -> None:
        self._socket, self._stream = connection, Stream(connection)
        self._regions: dict[int, Array] = {}
        self._slots = np.empty(0, dtype=np.uint8)
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._answering = threading.Lock()
        for number in range(threads):
            threading.Thread(target=self._work, name=f"millrace-encoder-{number}", daemon=True).start()

    def serve(self) -> None:
        """Until the parent closes the socket: raises `EOFError` or `OSError` then."""
        while True:
            head = Head._make(HEAD.unpack(self._stream.read(HEAD.size)))
            if head.say == Say.REGION:
                self._regions[head.ticket] = self._mapped(head.nbytes, mmap.PROT_READ)
            elif head.say == Say.SLOTS:
                self._slots = self._mapped(head.nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
            elif head.say == Say.FORGET:
                self._regions.pop(head.ticket, None)
            else:
                self._jobs.put(self._job(head.ticket, self._stream.read(head.nbytes)))

    def _mapped(self, nbytes: int, protection: int) -> Array:
        descriptor = self._stream.descriptors.popleft()
        try:
            return np.frombuffer(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, protection), dtype=np.uint8)
        finally:
            os.close(descriptor)

    def _job(self, ticket: int, data: bytes) -> _Job:
        request = Request._make(REQUEST.unpack_from(data))
        pieces = np.frombuffer(data, dtype=np.int64, offset=REQUEST.size).reshape(-1, request.pieces)
        base = self._regions[request.base_region] if request.has_base else None
        return _Job(ticket, request, self._regions[request.region], base, pieces)

    def _work(self) -> None:
        codec = PlaneCodec()
        while True:
            job = self._jobs.get()
            try:
                answer = self._answer(codec, job)
            except Exception:  # noqa: BLE001 - the parent encodes the chunk, and raises what there is to raise
                traceback.print_exc()
                answer = Answer(job.ticket, Shape.FAILED, False, 0, 0, 0, 0, 0.0, 0, 0.0)
            del job
            try:
                with self._answering:
                    self._socket.sendall(ANSWER.pack(*answer))
            except OSError:
                os._exit(0)  # nobody is there

    def _answer(self, codec: PlaneCodec, job: _Job) -> Answer:
        request = job.request
        taken: list[tuple[int, float]] = []
        base_changed = False

        def read_base() -> Array | None:
            nonlocal base_changed
            if job.base is None:
                raise AssertionError("there is no base")
            values = gathered(job.base, job.pieces[2], job.pieces[1])
            base_changed = checksum(values.data) != request.base_checksum
            return None if base_changed else values

        base = None
        if request.has_base:
            chain = Chain(request.chain_bytes, request.root_bytes) if request.has_chain else None
            base = BaseChunk(raw_checksum=request.base_checksum, read=read_base, chain=chain, limit=request.limit)
        setting = Setting(
            next_effort=lambda: Effort(request.effort),
            transform=lambda stored: stored,
            encoded=lambda effort, raw_bytes, stored_bytes, seconds: taken.append((stored_bytes, seconds)),
        )
        raw = gathered(job.region, job.pieces[0], job.pieces[1])
        form = form_of(codec, setting, raw, Kind.from_code(request.kind), base)
        taken += [(0, 0.0)] * (2 - len(taken))
        nbytes = 0 if form.stored is None else len(form.stored)
        if form.stored is not None:
            if nbytes > SLOT_BYTES:
                raise ValueError(f"a stored chunk of {nbytes} bytes does not fit into {SLOT_BYTES}")
            start = request.slot * SLOT_BYTES
            self._slots[start : start + nbytes] = np.frombuffer(form.stored, dtype=np.uint8)
        return Answer(
            job.ticket,
            _shape(form),
            base_changed,
            form.raw_checksum,
            form.stored_checksum,
            nbytes,
            *taken[0],
            *taken[1],
        )


def _shape(form: Form) -> Shape:
    if form.stored is None:
        return Shape.REFERENCE
    return Shape.DELTA if form.to_base else Shape.FULL


def _end_with(parent: int) -> None:
    """End this process when `parent` does: a child of that may still hold the other end of the socket."""
    watched = os.pidfd_open(parent)
    if os.getppid() != parent:
        os._exit(0)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.poll()
    os._exit(0)


def main(arguments: list[str]) -> None:
    """`descriptor parent threads niceness`: the socket, the process to end with, codec threads, the priority to have."""
    # Ctrl-C is the parent's to handle: it may well wait for a save.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    descriptor, parent, threads, niceness = map(int, arguments)
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    threading.Thread(target=_end_with, args=(parent,), name="millrace-parent", daemon=True).start()
    try:
        _Encoder(socket.socket(fileno=descriptor), threads).serve()
    except (EOFError, OSError):
        # Not by `exit`, which could wait for a thread in the middle of a chunk.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
