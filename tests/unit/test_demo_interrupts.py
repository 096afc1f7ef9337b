import os
import signal

import pytest

from millrace.demo import interrupts


class Swallows:
    """An object in whose destructor the interrupt arrives, where Python can only print it."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_swallowed_interrupt_is_remembered() -> None:
    before = signal.getsignal(signal.SIGINT)

    def work() -> None:
        with interrupts.remembered():
            thing = Swallows()
            del thing
            interrupts.check()

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is before
    interrupts.check()  # forgotten with the block


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_signals_are_interrupts_that_name_their_exit_code(number: signal.Signals, code: int) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt) as caught, interrupts.remembered():
        os.kill(os.getpid(), number)
    assert caught.value.args[1] == code
    with pytest.raises(KeyboardInterrupt) as caught, interrupts.held_back():
        os.kill(os.getpid(), number)
    assert caught.value.args[1] == code
    assert signal.getsignal(number) is before


def test_nohup_is_heeded() -> None:
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


def test_an_interrupt_is_held_back_to_the_end_of_the_block() -> None:
    steps = []

    def work() -> None:
        with interrupts.held_back():
            os.kill(os.getpid(), signal.SIGINT)
            steps.append("went on")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert steps == ["went on"]
