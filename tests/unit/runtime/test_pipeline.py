"""Jobs in threads: their errors refer to nothing of the caller once they have been raised."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from millrace.runtime.pipeline import run_in_order


class Data:
    """What a caller works on."""


def test_failed_jobs_leave_no_reference_to_the_data_of_their_caller() -> None:
    def load(data: Data) -> None:
        begun = threading.Barrier(4)

        def work(number: int) -> None:
            begun.wait(60.0)
            raise ValueError(f"{number} of {data}")

        list(run_in_order(range(4), work, 4))

    data = Data()
    seen = weakref.ref(data)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="0 of"):
            load(data)
        del data
        assert seen() is None
    finally:
        gc.enable()
