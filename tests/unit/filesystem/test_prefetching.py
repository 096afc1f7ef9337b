"""`fs.prefetch` and its orders, over local files: window, order, repeats, errors, end, fork."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.waiting import wait_until

import millrace
from millrace.errors import ConfigurationError, UsageError
from millrace.filesystem import prefetching
from millrace.filesystem.opens import open_hooks
from millrace.filesystem.orders import PrefetchingSampler, following, ray_file_order, without_repeats
from millrace.filesystem.prefetching import Prefetch
from millrace.store.records import BLOCK_BYTES

MB = 1_000_000
FILES, FILE_BYTES = 12, 3 * MB


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    for number in range(FILES):
        (folder / f"{number:02}.bin").write_bytes(bytes([number]) * FILE_BYTES)
    return sorted(map(str, folder.iterdir()))


def fetched(fs: millrace.MillraceFileSystem) -> int:
    return fs.cache_counters()["origin_bytes"]


def prefetching_threads() -> list[str]:
    """The threads of prefetches only: other threads of the process start and end independently."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("millrace-prefetch")]


def feeding_threads() -> list[str]:
    return [name for name in prefetching_threads() if name == "millrace-prefetch-feed"]


def settled(prefetch: Prefetch) -> None:
    """Wait until it has filled the window."""
    assert prefetch.wait(120)


def test_prefetch_stays_within_its_window_and_follows_the_reader(
    fs: millrace.MillraceFileSystem, files: list[str]
) -> None:
    with fs.prefetch(files, window=8 * MB) as prefetch:
        settled(prefetch)
        assert fetched(fs) == 2 * FILE_BYTES  # a third file would be too much
        for number, path in enumerate(files):
            assert fs.cat_file(path)[:1] == bytes([number])
            settled(prefetch)
            ahead = min(FILES - number - 1, 2)
            assert fetched(fs) == (number + 1 + ahead) * FILE_BYTES
            assert prefetch.progress.ahead_bytes == ahead * FILE_BYTES
        progress = prefetch.progress
    assert (progress.reached, progress.opened, progress.fetched_bytes) == (FILES, FILES, FILES * FILE_BYTES)
    assert progress.ended
    assert not open_hooks.registered


def test_prefetch_window_moves_with_every_kind_of_open(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    def buffered(path: str) -> None:
        with fs.open(path) as file:
            file.read(1)

    ways: list[Callable[[str], object]] = [
        buffered,
        fs.cat_file,
        lambda path: fs.open_input_file(path).close(),
        lambda path: fs.open_input_stream(f"file://{path}").close(),
        lambda path: fs.handler.open_input_file(path).close(),
        lambda path: millrace.filesystem("file", **fs._arguments, skip_instance_cache=True).cat_file(path),
    ]
    for twice in range(2):  # the second time every open is a hot one
        with fs.prefetch(files, window=8 * MB) as prefetch:
            settled(prefetch)
            for number, way in enumerate(ways):
                way(files[number])
                assert prefetch.progress.opened == number + 1, (twice, number)
                settled(prefetch)
            for path in files:
                fs.cat_file(path)


def test_reads_after_prefetch_send_no_request(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    with fs.prefetch(files, window="1GB") as prefetch:
        wait_until(lambda: prefetch.progress.ended)
    requests = fs.cache_counters()["origin_requests"]
    for path in files:
        fs.cat_file(path)
    assert fs.cache_counters()["origin_requests"] == requests


def test_object_larger_than_the_window_is_prefetched_in_part(tmp_path: Path, fs: millrace.MillraceFileSystem) -> None:
    (tmp_path / "large").write_bytes(bytes(40 << 20))
    with fs.prefetch([str(tmp_path / "large")], window=20 << 20) as prefetch:
        settled(prefetch)
        assert 0 < fetched(fs) <= 20 << 20
        fs.cat_file(str(tmp_path / "large"))
        assert fetched(fs) == 40 << 20


def test_prefetch_with_fast_or_jumping_reader_does_not_stall(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    gate = threading.Event()

    def slowly() -> Iterator[str]:
        gate.wait(120)
        yield from files

    with fs.prefetch(slowly(), window=8 * MB) as prefetch:
        for path in files[:6]:  # none of them has metadata yet
            fs.cat_file(path)
        gate.set()
        settled(prefetch)
        assert prefetch.progress.opened == 6
        assert fetched(fs) == 8 * FILE_BYTES
        fs.cat_file(files[11])  # the reader skips some, including some that were not reached yet
        wait_until(lambda: prefetch.progress.ended)
        assert prefetch.progress.opened == 12


def test_prefetch_of_endless_order_with_repeated_files_continues(
    fs: millrace.MillraceFileSystem, files: list[str]
) -> None:
    few = files[:4]
    with fs.prefetch(itertools.cycle(few), window=8 * MB) as prefetch:
        for epoch in range(3):
            for number, path in enumerate(few):
                for _ in range(3):  # as Parquet readers do
                    fs.cat_file(path)
                settled(prefetch)
                assert prefetch.progress.opened == epoch * 4 + number + 1
                assert prefetch.progress.reached <= epoch * 4 + number + 5
    assert fetched(fs) == 4 * FILE_BYTES
    wait_until(lambda: not feeding_threads())  # `close` waits for a second


def test_prefetch_reports_and_skips_failed_objects(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    reported: list[tuple[str, Exception]] = []
    paths = [files[0], "/nowhere", files[1]]
    with fs.prefetch(paths, window="1GB", on_error=lambda path, error: reported.append((path, error))) as prefetch:
        wait_until(lambda: prefetch.progress.ended)
        assert prefetch.progress.failed == 1
    assert [(path, type(error).__name__) for path, error in reported] == [("/nowhere", "ObjectNotFoundError")]
    assert fetched(fs) == 2 * FILE_BYTES


def test_prefetch_order_that_raises_is_reported(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    def broken() -> Iterator[str]:
        yield files[0]
        raise RuntimeError("no more")

    reported: list[str] = []
    with fs.prefetch(broken(), window="1GB", on_error=lambda _, error: reported.append(str(error))) as prefetch:
        wait_until(lambda: prefetch.progress.ended)
    assert reported == ["no more"]


@pytest.mark.parametrize("bad", [None, 5, b"x", "s3://bucket/key", "\0"])
def test_prefetch_with_unusable_path_reports_it_and_continues(
    fs: millrace.MillraceFileSystem, files: list[str], bad: Any
) -> None:
    errors: list[Any] = []
    with fs.prefetch([files[0], bad, *files[1:3]], on_error=lambda *error: errors.append(error)) as prefetch:
        settled(prefetch)
        assert prefetch.progress.failed == 1
        assert prefetch.progress.reached == 3
    assert [path for path, _ in errors] == [bad]
    assert fetched(fs) == 3 * FILE_BYTES


def test_prefetch_of_endless_unusable_paths_closes(fs: millrace.MillraceFileSystem) -> None:
    with fs.prefetch(itertools.repeat(None)) as prefetch:  # type: ignore[arg-type]
        wait_until(lambda: prefetch.progress.failed > 10)
    wait_until(lambda: not feeding_threads())


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_prefetch_order_that_raises_an_exit_is_reported(
    fs: millrace.MillraceFileSystem, files: list[str], ending: type[BaseException]
) -> None:
    def order() -> Iterator[str]:
        yield files[0]
        raise ending

    errors: list[tuple[str, Exception]] = []
    with fs.prefetch(order(), on_error=lambda *error: errors.append(error)) as prefetch:
        settled(prefetch)
        assert prefetch.progress.failed == 1
    ((path, error),) = errors
    assert path == ""
    assert ending.__name__ in str(error)
    assert isinstance(error, UsageError)


def test_prefetch_with_raising_on_error_continues(
    fs: millrace.MillraceFileSystem, files: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with fs.prefetch([files[0], "/none", files[1]], on_error=fail) as prefetch:
        settled(prefetch)
        assert prefetch.progress.failed == 1
    assert fetched(fs) == 2 * FILE_BYTES
    assert [line.message for line in caplog.records if line.exc_info] == ["on_error of a prefetch failed on /none"]


def test_prefetch_into_full_cache_stores_nothing(tmp_path: Path, files: list[str]) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, capacity=7 * MB)
    with fs.prefetch(files, window="1GB") as prefetch:
        wait_until(lambda: prefetch.progress.ended)
        progress = prefetch.progress
    assert fs.node.disks()[0][1] <= 7 * MB
    assert progress.unkept_bytes
    assert progress.fetched_bytes <= 7 * MB + 17 * FILE_BYTES  # in flight when the first did not fit


def test_prefetch_with_a_window_of_one_block_fetches_one_block_ahead(
    tmp_path: Path, fs: millrace.MillraceFileSystem
) -> None:
    (tmp_path / "large").write_bytes(bytes(2 * BLOCK_BYTES))
    with fs.prefetch([str(tmp_path / "large")], window=BLOCK_BYTES) as prefetch:
        settled(prefetch)
        assert prefetch.progress.fetched_bytes == fetched(fs) == BLOCK_BYTES


def test_wait_for_a_prefetch_that_reached_its_limit_of_paths_ends(
    fs: millrace.MillraceFileSystem, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetching, "_STEPS_AHEAD", 2)
    with fs.prefetch(files, window="1GB") as prefetch:
        assert prefetch.wait(20)
        assert prefetch.progress.reached == 2
        prefetch.advance(files[0])
        wait_until(lambda: prefetch.progress.reached == 3)


def test_prefetch_without_a_thread_follows_no_opens(
    fs: millrace.MillraceFileSystem, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fs.cat_file(files[0])
    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError):
        fs.prefetch(files)
    assert not open_hooks.registered


@pytest.mark.parametrize("window", [0, 1000, "50%", "much"])
def test_prefetch_window_below_one_block_raises(fs: millrace.MillraceFileSystem, window: int | str) -> None:
    with pytest.raises((UsageError, ConfigurationError), match="window"):
        fs.prefetch(["/x"], window=window)
    with pytest.raises(UsageError, match="one path"):
        fs.prefetch("/x")


def test_prefetch_close_cancels_pending_fetches(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    prefetch = fs.prefetch(files, window=8 * MB)
    settled(prefetch)
    prefetch.close()
    prefetch.close()
    assert not open_hooks.registered
    before = prefetch.progress
    fs.cat_file(files[0])
    prefetch.advance(files[1])
    assert before.ended
    assert fetched(fs) == 2 * FILE_BYTES
    wait_until(lambda: not feeding_threads())


def test_reads_during_prefetch_fetch_every_byte_once(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    with fs.prefetch(files, window=16 * MB):
        left = iter(files)
        lock = threading.Lock()

        def read() -> None:
            while True:
                with lock:
                    path = next(left, None)
                if path is None:
                    return
                assert len(fs.cat_file(path)) == FILE_BYTES

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert fetched(fs) == FILES * FILE_BYTES


def test_prefetch_in_forked_child_is_inactive_and_reads_succeed(
    fs: millrace.MillraceFileSystem, files: list[str]
) -> None:
    with fs.prefetch(files, window=8 * MB) as prefetch:
        settled(prefetch)
        child = os.fork()
        if not child:
            good = False
            try:
                prefetch.advance(files[5])
                good = (
                    prefetch.progress.ended and not open_hooks.registered and len(fs.cat_file(files[3])) == FILE_BYTES
                )
                prefetch.close()
            finally:
                os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert prefetch.progress.opened == 0
        prefetch.advance(files[3])
        wait_until(lambda: prefetch.progress.opened == 4)


# --- orders -------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abc")))
@settings(max_examples=50, deadline=None)
def test_without_repeats_removes_consecutive_duplicates(paths: list[str]) -> None:
    assert list(without_repeats(paths)) == [key for key, _ in itertools.groupby(paths)]


def test_prefetch_sampler_yields_the_wrapped_order_and_prefetches(
    fs: millrace.MillraceFileSystem, files: list[str]
) -> None:
    # Two samples a file; in pairs, as a batch sampler gives them; one index without a file.
    order = [[2, 3], [0, 1], [22, 5], [-1, 4]]
    sampler = PrefetchingSampler(
        order, fs, path_of=lambda index: None if index < 0 else files[index // 2], window=8 * MB
    )
    assert len(sampler) == 4
    seen = []
    for batch in sampler:
        seen.append(batch)
        for index in batch:
            if index >= 0:
                fs.cat_file(files[index // 2])
    assert seen == order
    assert fetched(fs) == 4 * FILE_BYTES
    assert list(sampler) == order  # a second epoch


def test_prefetch_sampler_left_early_stops_its_prefetch(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    iterator = iter(PrefetchingSampler(range(FILES), fs, path_of=files.__getitem__, window=8 * MB))
    next(iterator)
    assert prefetching_threads()
    iterator.close()  # type: ignore[attr-defined]
    wait_until(lambda: not prefetching_threads())
    assert not open_hooks.registered


def test_prefetch_follows_batches_of_another_process(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    batches = [{"path": [path]} for path in files]
    for number, batch in enumerate(
        following(batches, files, fs, path_of=lambda batch: batch["path"][-1], window=8 * MB)
    ):
        assert batch is batches[number]
        fs.cat_file(files[number])
        wait_until(lambda number=number: fetched(fs) >= min(FILES, number + 3) * FILE_BYTES)
        assert fetched(fs) <= min(FILES, number + 3) * FILE_BYTES


@pytest.mark.parametrize("reseed", [True, False])
def test_prefetch_order_of_ray_is_that_of_its_reads(reseed: bool) -> None:
    source = pytest.importorskip("ray.data.datasource.file_based_datasource")
    config = source.FileShuffleConfig(seed=7, reseed_after_execution=reseed)
    paths = [f"b/{number:03}" for number in range(57)]
    for execution in range(3):
        expected, _ = source._shuffle_file_metadata(paths, [None] * 57, config, execution)
        assert ray_file_order(paths, seed=7, execution=execution, reseed_after_execution=reseed) == expected
    assert ray_file_order([], seed=1) == []
