"""The process that carries out the asynchronous saves of one manager. `saver_process` starts it.

It maps the staged states in shared memory, and encodes, writes, uploads, publishes and prunes. Its events, warnings and log
lines go to the training process. It ends when the training process ends, for whatever reason, and when its socket is closed.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import queue
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np

from millrace.checkpoint.run import processes
from millrace.checkpoint.run import saver_protocol as protocol
from millrace.checkpoint.run.engine import EngineOptions, SaveEngine
from millrace.checkpoint.run.save_values import LastSave, Staged, Written, picklable
from millrace.checkpoint.run.saving import Report, SaveProgress, SaveResult, SaveRunner
from millrace.checkpoint.writing.rank_writer import RankWriter
from millrace.checkpoint.writing.shared_plan import SharedBase, SharedPlan, save_shared
from millrace.errors import MillraceError, UsageError
from millrace.events import redirect
from millrace.origin.base import part_of
from millrace.runtime.pipeline import limit_arenas

_REPORT_SECONDS = 0.05


class _Mapping(NamedTuple):
    """Shared memory of the training process, read-only. `memory` is None without tensors."""

    memory: mmap.mmap | None
    address: int
    nbytes: int


_NOTHING = _Mapping(None, 0, 0)


@dataclass(kw_only=True)
class _MappedState:
    """A staged state of the training process. After `release` its memory may be overwritten."""

    channel: protocol.Channel
    ticket: int
    nbytes: int
    seconds: float
    mapping: _Mapping
    plan: SharedPlan | None = None
    objects: list[bytes] = field(default_factory=list)
    is_released: bool = False

    def release(self) -> None:
        if not self.is_released:
            self.is_released = True
            self.channel.send(protocol.Released(self.ticket))


def _save_mapped(staged: Staged, writer: RankWriter, count: Callable[[int], None]) -> None:
    if not isinstance(staged, _MappedState) or staged.plan is None:
        raise AssertionError("the state was not staged by the training process")
    save_shared(staged.plan, staged.objects, staged.mapping.address, staged.mapping.memory, writer, count)


class _Saver:
    """Receives messages in the calling thread, and carries them out in another one, in order."""

    def __init__(self, channel: protocol.Channel) -> None:
        self._channel = channel
        self._tasks: queue.SimpleQueue[object] = queue.SimpleQueue()
        # Progress that was sent and is not acknowledged, by ticket.
        self._acknowledged: dict[int, queue.SimpleQueue[None]] = {}
        self._regions: dict[int, _Mapping] = {}
        self._plan: SharedPlan | None = None
        self._uploads = SaveRunner()
        self._engine: SaveEngine | None = None
        self._question = 0

    def serve(self) -> None:
        """Handle messages until the training process closes the socket. Then raises `EOFError` or `OSError`."""
        threading.Thread(target=self._work, name="millrace-saver", daemon=True).start()
        while True:
            message = self._channel.receive()
            if isinstance(message, protocol.Acknowledge):
                self._acknowledged[message.ticket].put(None)
            elif isinstance(message, protocol.MapRegion):
                self._regions[message.number] = self._mapped(message.nbytes)
            elif isinstance(message, protocol.Closing):
                self._begin_closing(message)
            else:
                self._tasks.put(message)

    # --- in the thread ----------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._carry_out(self._tasks.get()):
                continue
        except OSError:
            os._exit(0)  # the training process has ended
        except BaseException:  # noqa: BLE001 - a defect
            _fail()
        os._exit(0)

    def _carry_out(self, message: object) -> bool:
        """Returns False after the last message."""
        if isinstance(message, protocol.Question):
            self._question, message = message.number, message.message
        if isinstance(message, protocol.Start):
            return self._start(message)
        engine = self._engine
        if engine is None:
            raise AssertionError("the first message is `Start`")
        if isinstance(message, protocol.Save):
            self._save(engine, message)
        elif isinstance(message, protocol.Decide):
            self._decide(engine, message.step)
        elif isinstance(message, SharedPlan):
            self._plan = message
        elif isinstance(message, protocol.DropRegion):
            self._regions.pop(message.number, None)
        elif isinstance(message, protocol.StartOver):
            engine.start_over()
        elif isinstance(message, protocol.TakeState):
            self._take_state(engine, message)
        elif isinstance(message, protocol.GiveState):
            self._give_state(engine)
        elif isinstance(message, protocol.Close):
            engine.close()
            self._respond()
            return False
        else:
            raise AssertionError(f"an unknown message: {type(message).__name__}")
        return True

    def _start(self, message: protocol.Start) -> bool:
        processes.represent(message.process)
        try:
            options: EngineOptions = pickle.loads(message.options)
            self._engine = SaveEngine(
                options=options,
                tiers=options.open(),
                damaged=set(),
                write=_save_mapped,
                on_claim=self._channel.send,
            )
        except Exception as error:  # noqa: BLE001 - whatever a class of the user raises
            self._respond(error=UsageError(f"{type(error).__name__}: {error!s:.300}"))
            return False
        self._respond()
        return True

    def _decide(self, engine: SaveEngine, step: int) -> None:
        engine.renew_operation()
        with part_of(engine.operation):
            try:
                order = engine.order(step)
            except Exception as error:  # noqa: BLE001 - raised in the training process, whatever it is
                self._respond(error=_portable(error))
            else:
                self._respond(order)

    def _save(self, engine: SaveEngine, message: protocol.Save) -> None:
        ticket = message.state.ticket
        logging.getLogger("millrace").setLevel(message.log_level)
        engine.damaged.update(message.damaged)
        staged = self._state(message.state)
        staged.plan, staged.objects = self._plan, message.objects
        report = self._report(ticket) if message.wants_progress else _ignore
        outcome: Written | Exception
        engine.renew_operation()
        with part_of(engine.operation):
            try:
                outcome = engine.save(message.request, staged, report)
            except Exception as error:  # noqa: BLE001 - raised in the training process, whatever it is
                outcome = _portable(error)
            del staged
            self._channel.send(protocol.Saved(ticket, outcome, tuple(engine.damaged)))
            if isinstance(outcome, Written) and outcome.is_near and engine.uploader is not None:
                near = outcome  # for the type of the closure
                self._uploads.submit(near.result.step, lambda _: self._upload(engine, near, ticket, report))
            else:
                self._acknowledged.pop(ticket, None)

    def _upload(self, engine: SaveEngine, written: Written, ticket: int, report: Report) -> SaveResult:
        outcome: SaveResult | Exception
        try:
            outcome = engine.upload(written, report)
        except Exception as error:  # noqa: BLE001 - raised in the training process, whatever it is
            outcome = _portable(error)
        except BaseException:  # noqa: BLE001 - of a library, such as `asyncio.CancelledError`
            _fail()
        self._acknowledged.pop(ticket, None)
        self._channel.send(protocol.Uploaded(ticket, outcome))
        return written.result

    def _report(self, ticket: int) -> Report:
        """A function that passes progress on, not too often, and waits until it was reported."""
        acknowledged = self._acknowledged[ticket] = queue.SimpleQueue()
        last: list[Any] = [None, 0.0]

        def report(progress: SaveProgress) -> None:
            now = time.monotonic()
            is_end = progress.done_bytes >= progress.total_bytes
            if progress.phase == last[0] and not is_end and now - last[1] < _REPORT_SECONDS:
                return
            last[:] = progress.phase, now
            self._channel.send(protocol.Progressed(ticket, progress))
            acknowledged.get()

        return report

    def _take_state(self, engine: SaveEngine, message: protocol.TakeState) -> None:
        previous: LastSave | None = None
        if message.last is not None and message.base is not None:
            staged = self._state(message.last)
            previous = LastSave(message.base.base(staged.mapping.address, staged.mapping.memory), staged)
        engine.take_state(message.state, previous)

    def _give_state(self, engine: SaveEngine) -> None:
        state, previous = engine.give_state()
        ticket: int | None = None
        base: SharedBase | None = None
        if previous is not None:
            staged = previous.staged
            if not isinstance(staged, _MappedState):
                raise AssertionError("the state was not staged by the training process")
            base = SharedBase.of(previous.base, staged.mapping.address, staged.mapping.nbytes)
            ticket = staged.ticket
            if base is None:
                staged.release()
        self._respond(protocol.StateGiven(state, None if base is None else ticket, base))

    # --- inside -----------------------------------------------------------------------------------

    def _respond(self, value: Any = None, error: Exception | None = None) -> None:
        self._channel.send(protocol.Response(self._question, value, error))

    def _mapped(self, nbytes: int) -> _Mapping:
        descriptor = self._channel.take_descriptor()
        try:
            memory = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:  # for `main` that would be the end of the training process
            raise MemoryError(f"{nbytes} bytes of shared memory cannot be mapped ({error.strerror})") from error
        finally:
            os.close(descriptor)
        return _Mapping(memory, np.frombuffer(memory, dtype=np.uint8).ctypes.data, nbytes)

    def _state(self, state: protocol.SharedState) -> _MappedState:
        return _MappedState(
            channel=self._channel,
            ticket=state.ticket,
            nbytes=state.nbytes,
            seconds=state.seconds,
            mapping=_NOTHING if state.region is None else self._regions[state.region],
        )

    def _begin_closing(self, message: protocol.Closing) -> None:
        if self._engine is not None:
            if not message.in_flight:
                self._engine.renew_operation()
            self._engine.is_closing = True


def _fail() -> NoReturn:
    """End this process after an unexpected error, without waiting for its threads. The training process reports the end."""
    traceback.print_exc()
    os._exit(1)


def _ignore(progress: SaveProgress) -> None:
    """For a manager without `on_progress`."""


def _portable(error: Exception) -> Exception:
    """An error that can be pickled, with its type if possible. An unexpected one has a note of its traceback."""
    if not isinstance(error, MillraceError):
        error.add_note("".join(traceback.format_tb(error.__traceback__)))
    # The frames refer to the state.
    traceback.clear_frames(error.__traceback__)
    return picklable(error)


# --- events, warnings and log lines ---------------------------------------------------------------


class _Forward(logging.Handler):
    """Sends log records to the training process."""

    def __init__(self, channel: protocol.Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)  # with the traceback
        plain = (str, int, float, bool, type(None))
        kept = {name: value for name, value in record.__dict__.items() if isinstance(value, plain)}
        try:
            self._channel.send(protocol.Logged({**kept, "msg": text, "args": None, "exc_text": None}))
        except OSError:
            return  # the training process has ended


def _forward_everything(channel: protocol.Channel) -> None:
    def warn(message: Any, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any) -> None:
        channel.send(protocol.Warned(str(message), category))

    redirect(channel.send)
    log = logging.getLogger("millrace")
    log.addHandler(_Forward(channel))
    log.propagate = False
    warnings.simplefilter("always")
    warnings.showwarning = warn


def main(arguments: list[str]) -> None:
    """Run with `descriptor niceness`: the socket, and the priority."""
    descriptor, niceness = map(int, arguments)
    # Not before the imports, for which the first save waits. All threads inherit it.
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    limit_arenas()
    channel = protocol.Channel(socket.socket(fileno=descriptor))
    _forward_everything(channel)
    try:
        _Saver(channel).serve()
    except (EOFError, OSError):
        # `exit` could wait for a thread in the middle of a chunk.
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a defect, or no descriptor is left: `exit` would wait for an upload
        _fail()
