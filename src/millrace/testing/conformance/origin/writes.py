"""Objects that are put, streamed and deleted."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.errors import ObjectExistsError, ObjectNotFoundError, UsageError
from millrace.origin import Origin
from millrace.testing.conformance.origin.base import OriginSuite, listed


class Writes(OriginSuite):
    """What an origin must do that can write; one that cannot says so."""

    def test_one_that_cannot_write_says_so(self, origin: Origin, root: str) -> None:
        if self.writes:
            pytest.skip("this origin can write")
        for call in (
            lambda: origin.put(f"{root}/object", b"x"),
            lambda: origin.open_writer(f"{root}/object"),
            lambda: origin.delete([f"{root}/object"]),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.next_step

    def test_put_if_absent_has_one_winner(self, writable: Origin, root: str) -> None:
        if not self.one_creator:
            pytest.skip("this storage cannot make one only where there is none")
        barrier = threading.Barrier(8)

        def put(number: int) -> bool:
            barrier.wait()
            try:
                writable.put(f"{root}/once", b"%d" % number, if_absent=True)
            except ObjectExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = [number for number, wins in enumerate(pool.map(put, range(8))) if wins]
        assert len(won) == 1
        assert bytes(writable.read(f"{root}/once", 0, 1)) == b"%d" % won[0]

    def test_put_if_absent_keeps_what_is_there(self, writable: Origin, root: str) -> None:
        writable.put(f"{root}/once", b"first", if_absent=True)
        with pytest.raises(ObjectExistsError):
            writable.put(f"{root}/once", b"other", if_absent=True)
        assert bytes(writable.read(f"{root}/once", 0, 5)) == b"first"

    def test_deleting_what_is_missing_is_no_error(self, writable: Origin, root: str) -> None:
        writable.put(f"{root}/here", b"x")
        writable.delete([f"{root}/here", f"{root}/missing"])
        with pytest.raises(ObjectNotFoundError):
            writable.head(f"{root}/here")

    def test_many_are_deleted_at_once(self, writable: Origin, root: str) -> None:
        keys = [f"{root}/many/{number:03}" for number in range(120)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: writable.put(key, b"x"), keys))
        writable.delete(keys)
        for key in (keys[0], keys[59], keys[119]):
            with pytest.raises(ObjectNotFoundError):
                writable.head(key)
        if self.lists:
            assert listed(writable, f"{root}/many") == []

    def test_a_writer_publishes_at_its_end(self, writable: Origin, root: str) -> None:
        with writable.open_writer(f"{root}/streamed") as writer:
            assert writer.write(b"one ") == 4
            with pytest.raises(ObjectNotFoundError):
                writable.head(f"{root}/streamed")
            writer.write(memoryview(b"two"))
        assert bytes(writable.read(f"{root}/streamed", 0, 7)) == b"one two"

    def test_a_large_stream_arrives_in_order(self, writable: Origin, root: str) -> None:
        parts = [bytes([number]) * 1_500_000 for number in range(20)]
        with writable.open_writer(f"{root}/large") as writer:
            for part in parts:
                writer.write(part)
        data = b"".join(parts)
        info = writable.head(f"{root}/large")
        assert info.size == len(data)
        assert bytes(writable.read(info.key, 0, info.size, version=info.version)) == data

    def test_an_exception_publishes_nothing(self, writable: Origin, root: str) -> None:
        writable.put(f"{root}/object", b"old")

        class StopError(Exception):
            pass

        def fail_half_way() -> None:
            with writable.open_writer(f"{root}/object") as writer:
                writer.write(b"half")
                raise StopError

        with pytest.raises(StopError):
            fail_half_way()
        assert bytes(writable.read(f"{root}/object", 0, 3)) == b"old"

    def test_abort_and_close_may_come_twice(self, writable: Origin, root: str) -> None:
        writer = writable.open_writer(f"{root}/object")
        writer.write(b"x")
        writer.abort()
        writer.abort()
        with pytest.raises(ObjectNotFoundError):
            writable.head(f"{root}/object")
        writer = writable.open_writer(f"{root}/object")
        writer.close()
        writer.close()
        assert writable.head(f"{root}/object").size == 0
