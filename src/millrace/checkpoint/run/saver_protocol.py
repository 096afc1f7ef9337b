"""The messages between a training process and its saver process: pickles over a Unix socket, each after its length.

The training process also sends `SharedPlan`, the plan of the saves from now on. The saver also sends each `Event`, and
`ClaimState` when it has taken the run. State dicts are not sent: their tensors are in shared memory, whose descriptors are
sent once.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.checkpoint.run.processes import Process
from millrace.checkpoint.run.save_values import RunState, SaveRequest, Written
from millrace.checkpoint.run.saving import SaveProgress, SaveResult
from millrace.checkpoint.writing.shared_plan import SharedBase

_LENGTH = struct.Struct("<Q")
_FDS_AT_ONCE = 16
_UNDIVIDED_BYTES = 8 << 10  # such a message is sent at once or not at all


# --- from the training process --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """A message that has a response, which repeats `number`. A response with another number is dropped."""

    number: int
    message: Request


@dataclass(frozen=True, slots=True)
class Start:
    """The first message: pickled `EngineOptions`, and the process for which the saver acts. The response is an error if the
    options cannot be unpickled or used there.
    """

    options: bytes
    process: Process


@dataclass(frozen=True, slots=True)
class MapRegion:
    """Map shared memory, whose descriptor comes with the message."""

    number: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DropRegion:
    """The memory was freed."""

    number: int


@dataclass(frozen=True, slots=True)
class SharedState:
    """A staged state. `ticket` names it in both processes until `Released`; `region` is None without tensors."""

    ticket: int
    region: int | None
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Save:
    """Save a state by the last plan. The replies are `Saved` and, if the save is near only, `Uploaded`."""

    state: SharedState
    request: SaveRequest
    objects: list[bytes]
    damaged: tuple[str, ...]
    wants_progress: bool
    log_level: int


@dataclass(frozen=True, slots=True)
class Decide:
    """Decide the order of the next save, on the first of several ranks. The response is a `SaveOrder`."""

    step: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The progress of a save was reported."""

    ticket: int


@dataclass(frozen=True, slots=True)
class StartOver:
    """After a restore, as `RunSaver.start_over`."""


@dataclass(frozen=True, slots=True)
class TakeState:
    """Continue after another saver of the run."""

    state: RunState
    last: SharedState | None
    base: SharedBase | None


@dataclass(frozen=True, slots=True)
class GiveState:
    """Give up the run. The response is `StateGiven`."""


@dataclass(frozen=True, slots=True)
class Closing:
    """`Close` follows when the saves in flight have ended; they must not begin a new period of the timeout."""

    in_flight: bool


@dataclass(frozen=True, slots=True)
class Close:
    """Release the run, and end."""


Request = Start | Decide | GiveState | Close


# --- from the saver process -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Response:
    """The response to the question of this number: its value, or an error."""

    number: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Logged:
    """A log record, without objects of the saver."""

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning."""

    text: str
    category: type[Warning]


@dataclass(frozen=True, slots=True)
class Progressed:
    """The progress of a save. The saver waits for `Acknowledge`."""

    ticket: int
    progress: SaveProgress


@dataclass(frozen=True, slots=True)
class Saved:
    """The save has ended, with a result or an error."""

    ticket: int
    outcome: Written | Exception
    damaged: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Uploaded:
    """The upload of a save has ended, with a result or an error."""

    ticket: int
    outcome: SaveResult | Exception


@dataclass(frozen=True, slots=True)
class Released:
    """The state is not needed any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class StateGiven:
    """The state of the run, and of the last save."""

    state: RunState
    ticket: int | None
    base: SharedBase | None


class Channel:
    """Sends and receives messages. `send` may be called from several threads, `receive` from one.

    While the other side does not receive, `send` calls its `look` every `look_seconds`.
    """

    def __init__(self, connection: socket.socket, *, look_seconds: float = 0.0) -> None:
        self._socket = connection
        if look_seconds:
            limit = struct.pack("ll", int(look_seconds), int(look_seconds % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sending = threading.Lock()
        self._descriptors: deque[int] = deque()

    def send(self, message: object, descriptor: int | None = None, *, look: Callable[[], None] | None = None) -> None:
        """Raises `OSError` when the other side has closed, and errors of pickle, after which the channel still works.

        A Ctrl-C during a long message ends the connection: the other side would take the next one for its rest.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        # It arrives with the first byte.
        attached = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]
        with self._sending:
            left = [memoryview(_LENGTH.pack(len(data))), memoryview(data)]
            try:
                while left:
                    try:
                        sent = self._socket.sendmsg(left, attached)
                    except BlockingIOError:  # the kernel's limit
                        if look is not None:
                            look()
                        continue
                    left, attached = _without(left, sent), []
            except BaseException:
                # Ctrl-C also ends the call that sends a part, and then how much it sent is unknown.
                if len(data) > _UNDIVIDED_BYTES:
                    self.shut_down()
                raise

    def receive(self) -> object:
        """The next message. Raises `EOFError` when the other side has closed, `OSError`, and errors of pickle."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def take_descriptor(self) -> int:
        """The oldest received descriptor, which the caller closes."""
        return self._descriptors.popleft()

    def shut_down(self) -> None:
        """End the connection, so that `receive` returns in another thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def close(self) -> None:
        """Close the descriptor. No thread may use the channel any more."""
        self._socket.close()

    def _read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, received = memoryview(data), 0
        while received < nbytes:
            if nbytes == _LENGTH.size:
                # Descriptors come with the first byte of a length.
                part, descriptors, _, _ = socket.recv_fds(self._socket, nbytes - received, _FDS_AT_ONCE)
                self._descriptors.extend(descriptors)
                view[received : received + len(part)] = part
                count = len(part)
            else:
                count = self._socket.recv_into(view[received:])
            if not count:
                raise EOFError("the other side has closed")
            received += count
        return data


def _without(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """What follows the first `nbytes` of the buffers."""
    left: list[memoryview] = []
    for buffer in buffers:
        skipped = min(nbytes, len(buffer))
        nbytes -= skipped
        if skipped < len(buffer):
            left.append(buffer[skipped:])
    return left
