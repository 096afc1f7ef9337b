"""The parent's side of `encoder_main`: starts the process, sends it chunks in shared memory, and receives the results.

Encoding threads compete with the training loop for the interpreter's lock; a process does not.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from millrace.checkpoint.codec.chunks import Array, Effort, Kind
from millrace.checkpoint.state.arena import Arena, Region, regions
from millrace.checkpoint.writing.chunk_forms import Chain
from millrace.checkpoint.writing.encoder_protocol import (
    HEADER,
    REQUEST,
    RESULT,
    SLOT_BYTES,
    EncodeRequest,
    EncodeResult,
    MessageType,
    ResultKind,
)
from millrace.events import Event, emit

_NICENESS = 10
# A child that ended by itself will probably do so again.
_MAX_STARTS = 3
# One chunk takes some milliseconds, the start of the child half a second. After this time it counts as hanging.
_PATIENCE_SECONDS = 120.0
# Chunks in the child's queue in addition to those that its threads encode: the parent's thread may wait for the
# interpreter's lock for as long as some chunks take.
_AHEAD = 8
_RECEIVE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Pieces:
    """The places of a chunk's bytes in a region: int64 offsets and lengths."""

    region: Region
    offsets: Array
    lengths: Array


def pieces_in(among: Iterable[Region], addresses: Sequence[int], lengths: Sequence[int]) -> Pieces | None:
    """The memory at these addresses as pieces of the region that contains all of it; None if none does."""
    first = addresses[0]
    for region in among:
        if region.address <= first < region.address + region.nbytes:
            offsets, counts = np.array(addresses) - region.address, np.array(lengths)
            inside = offsets.min() >= 0 and (offsets + counts).max() <= region.nbytes
            return Pieces(region, offsets, counts) if inside else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBase:
    """The base of a chunk, in pieces of the same lengths as those of the chunk."""

    pieces: Pieces
    raw_checksum: int
    chain: Chain | None
    limit: float


class EncoderProcess:
    """A child process with `threads` codec threads, started by `begin` and kept until `close`. For one thread at a time.

    A failure of the child is an event, and None in place of a result: then the caller encodes the chunk.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self.window = 2 * threads + _AHEAD
        """Maximum number of chunks that are submitted and not released."""
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starts = 0
        self._slots: Arena | None = None
        self._free: deque[int] = deque()
        self._slot_of: dict[int, int] = {}
        self._results: dict[int, EncodeResult] = {}
        self._received = b""
        self._tickets = 0
        # The numbers of the regions that the child has mapped.
        self._regions: set[int] = set()
        self._end: weakref.finalize[..., EncoderProcess] | None = None

    @property
    def pid(self) -> int | None:
        """The child's pid; None if there is no child."""
        return None if self._child is None else self._child.pid

    def begin(self) -> bool:
        """Prepare for a save: start the child if there is none. Returns False if that fails."""
        if self._socket is None and not self._start():
            return False
        for number in self._regions - {region.number for region in regions()}:
            self._regions.discard(number)
            self._send(HEADER.pack(MessageType.FORGET, number, 0))
        return self._socket is not None

    def submit(self, raw: Pieces, kind: Kind, effort: Effort, base: SharedBase | None) -> int | None:
        """Send a chunk to the child; returns the ticket for its result, None without a child. At most `window` at a time."""
        parts = [raw.offsets, raw.lengths]
        self._share(raw.region)
        if base is not None:
            parts.append(base.pieces.offsets)
            self._share(base.pieces.region)
        if self._socket is None:
            return None
        slot = self._free.popleft()
        chain = None if base is None else base.chain
        request = EncodeRequest(
            slot=slot,
            kind=kind.code,
            effort=effort,
            pieces=len(raw.offsets),
            region=raw.region.number,
            has_base=base is not None,
            has_chain=chain is not None,
            base_region=0 if base is None else base.pieces.region.number,
            base_checksum=0 if base is None else base.raw_checksum,
            chain_bytes=0 if chain is None else chain.chain_bytes,
            root_bytes=0 if chain is None else chain.root_bytes,
            limit=0.0 if base is None else base.limit,
        )
        body = b"".join([REQUEST.pack(*request), *(part.astype(np.int64, copy=False).tobytes() for part in parts)])
        self._tickets += 1
        self._slot_of[self._tickets] = slot
        self._send(HEADER.pack(MessageType.ENCODE, self._tickets, len(body)) + body)
        return self._tickets

    def wait(self, ticket: int) -> tuple[EncodeResult, memoryview] | None:
        """Wait for the result of a chunk and its stored bytes, valid until `release`; None if the child failed."""
        while ticket not in self._results:
            if self._socket is None:
                return None
            self._receive(self._socket)
        result = self._results.pop(ticket)
        if result.kind == ResultKind.FAILED or self._slots is None:
            emit(Event(name="checkpoint.encoder.failed", subject=f"process {self.pid}", detail="a chunk failed there"))
            return None
        start = self._slot_of[ticket] * SLOT_BYTES
        return result, self._slots.view()[start : start + result.stored_bytes]

    def release(self, ticket: int) -> None:
        """Free the slot of a result."""
        self._free.append(self._slot_of.pop(ticket))

    def close(self) -> None:
        """End the child. Idempotent; `begin` starts another one."""
        if self._end is not None:
            self._end()
        self._child = self._socket = self._end = None

    # --- inside -----------------------------------------------------------------------------------

    def _start(self) -> bool:
        if self._starts >= _MAX_STARTS:
            return False
        self._starts += 1
        if self._slots is None:
            self._slots = Arena(self.window * SLOT_BYTES, pinned=False, shared=True)
        slots = self._slots.region
        if slots is None or not sys.executable or not hasattr(os, "pidfd_open"):
            self._starts = _MAX_STARTS
            return False
        ours, theirs = socket.socketpair()
        ours.settimeout(_PATIENCE_SECONDS)
        try:
            child = _spawn(theirs.fileno(), self._threads)
        except OSError as error:
            ours.close()
            self._report("start", str(error))
            return False
        finally:
            theirs.close()
        self._child, self._socket = child, ours
        self._end = weakref.finalize(self, _end, os.getpid(), child, ours)
        self._regions, self._received = set(), b""
        self._results, self._slot_of, self._free = {}, {}, deque(range(self.window))
        self._send(HEADER.pack(MessageType.SLOTS, slots.number, slots.nbytes), slots.descriptor)
        return self._socket is not None

    def _share(self, region: Region) -> None:
        if region.number not in self._regions:
            self._regions.add(region.number)
            self._send(HEADER.pack(MessageType.REGION, region.number, region.nbytes), region.descriptor)

    def _send(self, message: bytes, descriptor: int | None = None) -> None:
        if self._socket is None:
            return
        try:
            if descriptor is None:
                self._socket.sendall(message)
            else:
                socket.send_fds(self._socket, [message], [descriptor])
        except OSError as error:
            self._lose(str(error))

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_RECEIVE_BYTES)
        except OSError as error:
            self._lose(str(error))
            return
        if not data:
            self._lose("the process has ended")
            return
        data = self._received + data
        whole = len(data) - len(data) % RESULT.size
        self._received = data[whole:]
        for fields in RESULT.iter_unpack(data[:whole]):
            result = EncodeResult._make(fields)
            self._results[result.ticket] = result

    def _lose(self, problem: str) -> None:
        """End a child that failed, so that it cannot write into slots any more."""
        child = self._child
        self.close()
        status = "" if child is None or child.returncode is None else f", status {child.returncode}"
        self._report("lost", f"{problem}{status}; threads continue the save")

    def _report(self, what: str, detail: str) -> None:
        emit(Event(name=f"checkpoint.encoder.{what}", subject=f"start {self._starts} of {_MAX_STARTS}", detail=detail))


def _spawn(descriptor: int, threads: int) -> subprocess.Popen[bytes]:
    """Start the child. Raises `OSError`."""
    parent = os.getpid()
    # Relative to the whole process: the current thread may have a lower priority already.
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, parent) + _NICENESS)
    arguments = [str(value) for value in (descriptor, parent, threads, niceness)]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "millrace.checkpoint.writing.encoder_main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        # Signals to the parent's process group must not reach the child.
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OPENBLAS_NUM_THREADS": "1",
        },
    )


def _end(parent: int, child: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    if os.getpid() == parent:  # not in a fork of the parent
        child.kill()
        child.wait()
