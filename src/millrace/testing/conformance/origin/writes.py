"""Puts, streamed writes and deletions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.errors import ObjectExistsError, ObjectNotFoundError, UsageError
from millrace.origin import Origin
from millrace.testing.conformance.origin.base import OriginSuite, listed


class Writes(OriginSuite):
    """Requirements on writes. An origin without writes must raise `UsageError`."""

    def test_write_to_read_only_origin_raises(self, origin: Origin, root: str) -> None:
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
            pytest.skip("this storage has no conditional put")
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

    def test_put_if_absent_of_existing_key_raises_and_keeps_the_object(self, writable: Origin, root: str) -> None:
        writable.put(f"{root}/once", b"first", if_absent=True)
        with pytest.raises(ObjectExistsError):
            writable.put(f"{root}/once", b"other", if_absent=True)
        assert bytes(writable.read(f"{root}/once", 0, 5)) == b"first"

    def test_delete_of_missing_key_does_not_raise(self, writable: Origin, root: str) -> None:
        writable.put(f"{root}/here", b"x")
        writable.delete([f"{root}/here", f"{root}/missing"])
        with pytest.raises(ObjectNotFoundError):
            writable.head(f"{root}/here")

    def test_delete_of_many_keys_removes_all(self, writable: Origin, root: str) -> None:
        keys = [f"{root}/many/{number:03}" for number in range(120)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: writable.put(key, b"x"), keys))
        writable.delete(keys)
        for key in (keys[0], keys[59], keys[119]):
            with pytest.raises(ObjectNotFoundError):
                writable.head(key)
        if self.lists:
            assert listed(writable, f"{root}/many") == []

    def test_writer_publishes_when_closed(self, writable: Origin, root: str) -> None:
        with writable.open_writer(f"{root}/streamed") as writer:
            assert writer.write(b"one ") == 4
            with pytest.raises(ObjectNotFoundError):
                writable.head(f"{root}/streamed")
            writer.write(memoryview(b"two"))
        assert bytes(writable.read(f"{root}/streamed", 0, 7)) == b"one two"

    def test_large_stream_is_written_in_order(self, writable: Origin, root: str) -> None:
        parts = [bytes([number]) * 1_500_000 for number in range(20)]
        with writable.open_writer(f"{root}/large") as writer:
            for part in parts:
                writer.write(part)
        data = b"".join(parts)
        info = writable.head(f"{root}/large")
        assert info.size == len(data)
        assert bytes(writable.read(info.key, 0, info.size, version=info.version)) == data

    def test_writer_after_exception_publishes_nothing(self, writable: Origin, root: str) -> None:
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

    def test_writer_abort_and_close_twice_do_not_raise(self, writable: Origin, root: str) -> None:
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
