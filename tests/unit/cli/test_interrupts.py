import os
import signal

import pytest
from tests.support.interrupts import InterruptedWhenDeleted

from millrace.cli import interrupts


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupt_discarded_by_python_is_raised_at_the_next_check() -> None:
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with interrupts.remembered():
            thing = InterruptedWhenDeleted()
            del thing
            interrupts.check()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is before
    interrupts.check()  # the end of the block clears it


def test_interrupt_that_a_library_replaces_by_an_error_is_raised() -> None:
    def work() -> None:
        with interrupts.remembered():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                raise RuntimeError("unexpected pos")

    with pytest.raises(KeyboardInterrupt) as caught:
        work()
    assert caught.value.args[1] == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_termination_signal_raises_keyboard_interrupt_with_its_exit_code(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as caught, interrupts.remembered():
        os.kill(os.getpid(), number)
    assert caught.value.args[1] == code
    assert signal.getsignal(number) is before


def test_ignored_hangup_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    went_on = False
    try:
        with interrupts.remembered():
            os.kill(os.getpid(), signal.SIGHUP)
            went_on = True
        assert went_on
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
