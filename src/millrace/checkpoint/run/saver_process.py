"""The training process's side of the saver process: starts it, passes staged states to it, and receives the results.

A saving thread would share the interpreter's lock with the training loop; a process does not.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from millrace.checkpoint.run import saver_protocol as protocol
from millrace.checkpoint.run.claims import ClaimState
from millrace.checkpoint.run.driving import plan_save
from millrace.checkpoint.run.engine import EngineOptions, failed
from millrace.checkpoint.run.processes import is_stopped, this_process
from millrace.checkpoint.run.run_layout import parse_name
from millrace.checkpoint.run.save_values import LastSave, RunState, SaveOrder, SaveRequest, Written
from millrace.checkpoint.run.saving import Report, SaveResult
from millrace.checkpoint.state.arena import Region, regions
from millrace.checkpoint.state.staging import StagedState, Structure
from millrace.checkpoint.writing.shared_plan import SharedBase, SharedPlan
from millrace.checkpoint.writing.state_plan import PlannedState
from millrace.errors import MillraceError, RetryableError, SaverDiedError, UsageError
from millrace.events import Event, emit
from millrace.runtime import forks
from millrace.runtime.failures import reason_of

_NICENESS = 10
_END_SECONDS = 10.0
# A saver that is stopped (SIGSTOP, a debugger) at so many looks in succession is killed.
_LOOK_SECONDS, _MAX_STOPPED_LOOKS = 1.0, 30
# The first lines run before the imports, which take some seconds. The kernel kills the saver when the thread that started it
# ends, and so with the training process, whose children may have the other end of the socket open. Signals to all processes
# of a job are ignored: in a preemption the training process saves once more.
_CODE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv.pop()):
    os._exit(0)
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from millrace.checkpoint.run.saver_main import main
main(sys.argv[1:])
"""


# A forked process that kept the saver's end would hide the end of the saver.
_connections: weakref.WeakSet[socket.socket] = forks.objects_reset_in_child(socket.socket.close)

Upload = Callable[[Report | None], SaveResult]


class SaverUnavailable(Exception):  # noqa: N818 - not an error of the save, which this process carries out
    """There can be no saver process for this manager; the text is the reason."""


def is_supported(url: str) -> bool:
    """Whether there can be a saver process: Linux, shared memory with a descriptor, an interpreter, and a place that is not
    in the memory of this process.
    """
    # The executable of a frozen application would run the application again.
    has_interpreter = bool(sys.executable) and not getattr(sys, "frozen", False)
    return has_interpreter and sys.platform == "linux" and hasattr(os, "memfd_create") and "memory://" not in url


class SaverProcess:
    """Saves the states of one run in a child process, which the first save starts.

    `save`, `take_state`, `give_state` and `start_over` are for one thread at a time. A saver that died fails the save in
    flight with `SaverDiedError`. The next `start` starts another one, which continues with the claim of the dead one.
    `damaged` is shared with the training process.
    """

    def __init__(self, url: str, options: EngineOptions, trusted_types: tuple[type, ...], damaged: set[str]) -> None:
        self._url, self._trusted_types, self._damaged = url, trusted_types, damaged
        # The classes in these are known to this process only.
        self._options = replace(options, writer_options={**options.writer_options, "trusted_types": ()})
        self._child: _Child | None = None
        self._end: weakref.finalize[..., SaverProcess] | None = None
        self._owner = forks.Owner()
        self._tickets = itertools.count(1)
        self._planned: tuple[Structure, PlannedState] | None = None
        # What the next saver must have of the present one if it dies.
        self._known = RunState()
        # Near saves that never reach the run's URL, as the engine of a saver that died knew them.
        self._given_up: list[str] = []

    @property
    def pid(self) -> int | None:
        """The pid of the saver; None if there is none."""
        return None if self._child is None else self._child.process.pid

    def start(self) -> None:
        """Start the process if there is none, and wait until it is ready. Raises `SaverUnavailable`."""
        if self._child is not None and self._child.death is None:
            return
        self._lose()
        try:
            options = pickle.dumps(self._options, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise SaverUnavailable(f"the options cannot be pickled ({reason_of(error):.200})") from error
        child = _Child(self._url, self._known.claim)
        self._end = weakref.finalize(self, _end, os.getpid(), child)
        self._planned = None
        response = child.request(protocol.Start(options, this_process()))
        if response is None or response.error is not None:
            self._end()
            # It would also end at the next start, for example where its imports fail.
            problem = f"it ended during its start: {child.death}" if response is None else response.error
            raise SaverUnavailable(f"another process cannot use the options, or cannot start ({problem})")
        self._child = child
        if self._known != RunState():
            child.send(protocol.TakeState(self._known, None, None))

    def knows(self, staged: StagedState) -> bool:
        """Whether the saver has the plan of a state with this structure. `start` was called before."""
        return self._planned is not None and self._planned[0] == staged.structure

    def order(self, step: int) -> SaveOrder:
        """As `SaveEngine.order`. `start` was called before. Raises also `SaverDiedError`."""
        child = self._running()
        response = child.request(protocol.Decide(step))
        if response is None:
            raise child.died(f"the decision about the save of step {step}")
        if response.error is not None:
            raise response.error
        order: SaveOrder = response.value
        return order

    def save(self, request: SaveRequest, staged: StagedState, report: Report | None) -> tuple[Written, Upload]:
        """Save a state, which this object owns from now on. `start` was called before. Returns also a function that waits
        for the upload of a save that is near.

        Raises errors of the save, and `SaverDiedError`.
        """
        ticket = next(self._tickets)
        try:
            try:
                child = self._running()
                planned, plan = self._plan(staged)
                objects = planned.objects_of(staged.state, self._trusted_types)
                shared = child.share(ticket, staged)
            except BaseException:
                staged.release()
                raise
            if plan is not None:
                child.send(plan)
                if not plan.has_values:
                    self._planned = staged.structure, planned
            level = logging.getLogger("millrace").getEffectiveLevel()
            # Before the message: if the saver dies, it may have published this step.
            self._known = replace(self._known, attempted=request.step)
            child.send(protocol.Save(shared, request, objects, tuple(self._damaged), report is not None, level))
            found = child.wait(ticket, report, f"the save of step {request.step}")
        except Exception as error:
            # Errors in the saver emit this event there.
            emit(failed(self._url, request.step, error))
            raise
        if not isinstance(found, protocol.Saved):
            raise AssertionError("a save ends with its result")
        self._damaged.update(found.damaged)
        written = found.outcome
        if isinstance(written, Exception):
            child.drop(ticket)
            child.warn()
            raise written
        self._known = replace(self._known, newest_own=parse_name(written.name), attempted=None, may_go_back=False)
        if not written.is_near:  # else at the end of the upload, which needs a thread that receives its progress
            child.drop(ticket)
            child.warn()
        return written, functools.partial(self._upload, child, ticket, written)

    def start_over(self) -> None:
        """As `RunSaver.start_over`."""
        self._known = replace(self._known, may_go_back=True)
        # In a forked child, a thread of the parent may hold the lock of the channel without end.
        if self._child is not None and self._owner.is_this_process:
            self._child.send(protocol.StartOver())

    def take_state(self, state: RunState, previous: LastSave | None) -> None:
        """Continue after the engine of the training process. `start` was called before."""
        child = self._running()
        self._known = replace(state, complete=None, taken=set(), history=[], is_history_known=False, versions={})
        if state.claim is not None:
            child.claim = state.claim
        last: protocol.SharedState | None = None
        base: SharedBase | None = None
        if previous is not None:
            staged = previous.staged
            if isinstance(staged, StagedState) and staged.region is not None:
                base = SharedBase.of(previous.base, staged.region.address, staged.region.nbytes)
            if base is None or not isinstance(staged, StagedState):
                staged.release()
            else:
                last = child.share(next(self._tickets), staged)
        child.send(protocol.TakeState(state, last, base))

    def give_state(self) -> tuple[RunState, LastSave | None]:
        """Hand the run over to the engine of the training process. After the death of the saver it continues from less."""
        child = self._child
        if child is not None:
            try:
                response = child.request(protocol.GiveState())
            except BaseException:  # Ctrl-C: the saver releases the run, and this process has not received its state
                self._lose()
                raise
            if response is not None:
                self._known, child.claim = RunState(), None
                given: protocol.StateGiven = response.value
                return given.state, child.last_save(given)
        self._lose()
        state, self._known = self._known, RunState()
        return state, None

    def closing(self, *, in_flight: bool) -> None:
        """Announce `close`: saves in flight must not begin a new period of the timeout. From any thread."""
        child = self._child  # a saving thread may replace it
        if self._owner.is_this_process and child is not None:
            child.send(protocol.Closing(in_flight))

    def close(self) -> bool:
        """Release the run, and end the process. Idempotent. Returns False if the process has died with the run."""
        if not self._owner.is_this_process or self._child is None:
            return True
        child = self._child
        if child.request(protocol.Close()) is None and child.claim is not None:
            return False
        child.stop(patience=_END_SECONDS)
        self._child = None
        return True

    # --- inside -----------------------------------------------------------------------------------

    def _upload(self, child: _Child, ticket: int, written: Written, report: Report | None) -> SaveResult:
        """Wait for an upload. A method, because the process ends when there is no reference to this object."""
        try:
            return child.upload(ticket, written.result.step, report)
        except RetryableError:
            raise
        except MillraceError:
            self._given_up.append(written.name)
            raise

    def _running(self) -> _Child:
        if self._child is None:
            raise AssertionError("the saver was not started")
        return self._child

    def _lose(self) -> None:
        """Drop a saver that has died, except for what the next one needs."""
        child, self._child = self._child, None
        if child is not None:
            child.stop(patience=0)
            is_taken = child.claim is not None
            # The history of the saves, and whether they have reached the run's URL, is lost.
            self._known = replace(
                self._known,
                claim=child.claim,
                is_abandoned=is_taken,
                is_next_full=is_taken,
                given_up=set(self._given_up),
            )

    def _plan(self, staged: StagedState) -> tuple[PlannedState, SharedPlan | None]:
        """The plan of the state in this process, and that for the saver; None if the saver has it."""
        if self._planned is not None and staged.plan is None and self.knows(staged):
            return self._planned[1], None
        # Not the former plan either, if this fails: the saver keeps only the last one.
        self._planned = None
        planned = staged.plan or plan_save(staged.state)
        return PlannedState.of(planned, staged.state, staged.region, self._trusted_types)


class _Child:
    """One process: its connection, the thread that receives its messages, and the states that it uses."""

    def __init__(self, url: str, claim: ClaimState | None) -> None:
        """Raises `SaverUnavailable` if the process cannot start."""
        self._url = url
        self.death: str | None = None
        """How the process has ended; None while it runs."""
        self._unsent = ""
        self.claim = claim
        self._questions = itertools.count(1)
        # None at the end.
        self._responses: queue.SimpleQueue[object] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        _connections.update((ours, theirs))
        self._channel = protocol.Channel(ours, look_seconds=_LOOK_SECONDS)
        self._regions: set[int] = set()
        # By ticket. The methods of a dict are atomic.
        self._held: dict[int, StagedState] = {}
        self._inboxes: dict[int, queue.SimpleQueue[object]] = {}
        self._warned: deque[protocol.Warned] = deque()
        started: queue.SimpleQueue[subprocess.Popen[bytes] | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._start_and_receive, args=(theirs, started), name="millrace-saver", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is about to end
            theirs.close()
            ours.close()
            raise SaverUnavailable(f"no thread can start ({error})") from error
        found = started.get()
        if isinstance(found, Exception):
            raise SaverUnavailable(f"it cannot start ({found})") from found
        self.process = found

    def send(self, message: object, region: Region | None = None) -> None:
        """Send a message. If that fails, the process ends or has ended, and callers that wait for responses get an error."""
        try:
            descriptor = None if region is None else region.descriptor
            self._channel.send(message, descriptor, look=_Looks(self.process))
        except OSError as error:  # also where the kernel lacks memory: the process would wait for this message
            self._unsent = f"a message could not be sent ({error.strerror or error})"
            self._channel.shut_down()

    def request(self, message: protocol.Request) -> protocol.Response | None:
        """Send a request and wait for its response. None if the process has ended.

        Responses to earlier requests are dropped: a Ctrl-C may have ended the wait for one.
        """
        number = next(self._questions)
        self.send(protocol.Question(number, message))
        while self.death is None or not self._responses.empty():
            found = self._next(self._responses)
            if not isinstance(found, protocol.Response):
                break
            if found.number == number:
                return found
        return None

    def share(self, ticket: int, staged: StagedState) -> protocol.SharedState:
        """Make the memory of a state known to the process, and keep it until the process releases it."""
        self._held[ticket] = staged
        self._inboxes[ticket] = queue.SimpleQueue()
        region = staged.region
        for number in self._regions - {each.number for each in regions()}:
            self._regions.discard(number)
            self.send(protocol.DropRegion(number))
        if region is not None and region.number not in self._regions:
            self._regions.add(region.number)
            self.send(protocol.MapRegion(region.number, region.nbytes), region)
        if self.death is not None:
            self._release_all()
        return protocol.SharedState(ticket, None if region is None else region.number, staged.nbytes, staged.seconds)

    def wait(self, ticket: int, report: Report | None, what: str) -> object:
        """Wait for the next result of a save, and report its progress. Raises `SaverDiedError`."""
        inbox = self._inboxes[ticket]
        if self.death is not None:
            inbox.put(None)
        while isinstance(message := self._next(inbox), protocol.Progressed):
            if report is not None:
                report(message.progress)
            self.send(protocol.Acknowledge(ticket))
        if message is None:
            raise self.died(what)
        return message

    def _next(self, messages: queue.SimpleQueue[object]) -> object:
        """The next message."""
        look = _Looks(self.process)
        while True:
            with contextlib.suppress(queue.Empty):
                return messages.get(timeout=_LOOK_SECONDS)
            look()

    def upload(self, ticket: int, step: int, report: Report | None) -> SaveResult:
        """Wait for the upload of a save. Raises errors of the upload, and `SaverDiedError`."""
        try:
            found = self.wait(ticket, report, f"the upload of step {step}")
        finally:
            self.drop(ticket)
        if not isinstance(found, protocol.Uploaded):
            raise AssertionError("an upload ends with its result")
        self.warn()
        if isinstance(found.outcome, Exception):
            raise found.outcome
        return found.outcome

    def drop(self, ticket: int) -> None:
        """Expect no further results of a save."""
        self._inboxes.pop(ticket, None)

    def last_save(self, given: protocol.StateGiven) -> LastSave | None:
        """The last save, of which this process owns the state again."""
        staged = None if given.ticket is None else self._held.pop(given.ticket, None)
        if staged is None or given.base is None:
            return None
        region = staged.region
        return LastSave(given.base.base(0 if region is None else region.address, staged), staged)

    def died(self, what: str) -> SaverDiedError:
        """The error of what was in progress when the process ended."""
        return SaverDiedError(
            f"the saver process {self.process.pid} of {self._url} ended during {what} ({self.death})",
            next_step="save again, which starts another saver; see stderr and the kernel's log for the cause",
        )

    def stop(self, *, patience: float) -> None:
        """Wait for the end of the process, then kill it. Idempotent."""
        if threading.current_thread() is self._thread:  # where the collector may have ended up
            self.process.kill()
            self.process.wait()
        else:
            # Only the thread waits for the process: Ctrl-C inside `Popen.wait` can leave its lock locked.
            self._thread.join(patience)
            if self._thread.is_alive():
                self.process.kill()
            self._channel.shut_down()
            self._thread.join()
        self._channel.close()

    # --- in the thread ----------------------------------------------------------------------------

    def _start_and_receive(
        self, theirs: socket.socket, started: queue.SimpleQueue[subprocess.Popen[bytes] | Exception]
    ) -> None:
        """Run the process: it ends with the thread that starts it."""
        try:
            process = _spawn(theirs.fileno())
        except Exception as error:  # noqa: BLE001 - of the system, or of a text that cannot be an argument
            self._channel.close()
            started.put(error)
            return
        finally:
            theirs.close()
        started.put(process)
        self._receive(process)

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        problem = ""
        try:
            while True:
                self._handle(self._channel.receive())
        except (EOFError, OSError):
            pass  # it has ended
        except BaseException as error:  # noqa: BLE001 - of a hook, or a message that cannot be unpickled
            problem = f"{type(error).__name__}: {error!s:.200}"
            process.kill()
        self._channel.shut_down()
        status = process.wait()
        # A process that was killed or failed is the reason why a message could not be sent; one that ended with 0 is not.
        self.death = problem or (self._unsent if status == 0 else "") or _ending(status)
        self._release_all()
        for inbox in list(self._inboxes.values()):
            inbox.put(None)
        self._responses.put(None)

    def _handle(self, message: Any) -> None:
        if isinstance(message, Event):
            emit(message)
        elif isinstance(message, protocol.Logged):
            record = logging.makeLogRecord(dict(message.record))
            logging.getLogger(record.name).handle(record)
        elif isinstance(message, protocol.Warned):
            self._warned.append(message)
        elif isinstance(message, protocol.Progressed | protocol.Saved | protocol.Uploaded):
            self._inboxes[message.ticket].put(message)
        elif isinstance(message, protocol.Released):
            staged = self._held.pop(message.ticket, None)
            if staged is not None:
                staged.release()
        elif isinstance(message, ClaimState):
            self.claim = message
        elif isinstance(message, protocol.Response):
            self._responses.put(message)
        else:
            raise UsageError(f"an unknown message of the saver: {type(message).__name__}")

    def _release_all(self) -> None:
        while self._held:
            with contextlib.suppress(KeyError):  # the other thread took it
                self._held.popitem()[1].release()

    def warn(self) -> None:
        """Repeat the warnings of the saver in this thread. A filter may make an error of one."""
        while self._warned:
            warned = self._warned.popleft()
            warnings.warn(warned.text, warned.category, stacklevel=2)


def _ending(status: int) -> str:
    """How a process has ended, by its exit status. Real-time signals have no names."""
    if status >= 0:
        return f"exit status {status}"
    return signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"


class _Looks:
    """Looks at a process while something waits for it. One that stays stopped is killed: nothing may wait without end."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._stopped = process, 0

    def __call__(self) -> None:
        self._stopped = self._stopped + 1 if is_stopped(self._process.pid) else 0
        if self._stopped >= _MAX_STOPPED_LOOKS:
            self._process.kill()


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process. Raises `OSError` and `ValueError`."""
    parent = os.getpid()
    # Relative to the whole process: the current thread may have a lower priority already.
    niceness = min(19, os.getpriority(os.PRIO_PROCESS, parent) + _NICENESS)
    without = ("PYTHONWARNINGS", "PYTHONSTARTUP", "PYTHONINSPECT")
    return subprocess.Popen(
        # Not `multiprocessing`, which imports the script of the user.
        [sys.executable, "-P", "-c", _CODE, str(descriptor), str(niceness), str(parent)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[descriptor],
        # Signals to the parent's process group must not reach the child.
        start_new_session=True,
        env={
            **{name: value for name, value in os.environ.items() if name not in without},
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path if isinstance(path, str)),
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
    )


def _end(parent: int, child: _Child) -> None:
    if os.getpid() == parent:  # not in a fork of the parent
        child.process.kill()
        child.stop(patience=_END_SECONDS)
