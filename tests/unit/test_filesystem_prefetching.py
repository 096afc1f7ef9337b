"""`fs.prefetch` and the orders that feed it, over local files: window, order, repeats, errors, end, fork."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace
from millrace.errors import ConfigurationError, UsageError
from millrace.filesystem import opens
from millrace.filesystem.orders import PrefetchingSampler, following, ray_file_order, without_repeats
from millrace.filesystem.prefetching import Prefetch

MB = 1_000_000
FILES, FILE_BYTES = 12, 3 * MB


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    for number in range(FILES):
        (folder / f"{number:02}.bin").write_bytes(bytes([number]) * FILE_BYTES)
    return sorted(map(str, folder.iterdir()))


@pytest.fixture
def fs(tmp_path: Path) -> millrace.MillraceFileSystem:
    return millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, consistency="immutable")


def fetched(fs: millrace.MillraceFileSystem) -> int:
    return fs.cache_counters()["origin_bytes"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def settled(prefetch: Prefetch) -> None:
    """Wait until it has fetched all that the window allows."""
    assert prefetch.wait(20)


def test_it_stays_within_its_window_and_goes_on_with_the_reader(
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
    assert opens.listeners == ()


def test_every_way_to_open_moves_the_window(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
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


def test_reads_after_the_prefetch_ask_the_origin_nothing(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    with fs.prefetch(files, window="1GB") as prefetch:
        until(lambda: prefetch.progress.ended)
    requests = fs.cache_counters()["origin_requests"]
    for path in files:
        fs.cat_file(path)
    assert fs.cache_counters()["origin_requests"] == requests


def test_what_is_larger_than_the_window_is_fetched_up_to_it(tmp_path: Path, fs: millrace.MillraceFileSystem) -> None:
    (tmp_path / "large").write_bytes(bytes(40 << 20))
    with fs.prefetch([str(tmp_path / "large")], window=20 << 20) as prefetch:
        settled(prefetch)
        assert 0 < fetched(fs) <= 20 << 20
        fs.cat_file(str(tmp_path / "large"))
        assert fetched(fs) == 40 << 20


def test_a_reader_that_is_faster_or_jumps_does_not_stall_it(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    gate = threading.Event()

    def slowly() -> Iterator[str]:
        gate.wait(20)
        yield from files

    with fs.prefetch(slowly(), window=8 * MB) as prefetch:
        for path in files[:6]:  # none of them is known yet
            fs.cat_file(path)
        gate.set()
        settled(prefetch)
        assert prefetch.progress.opened == 6
        assert fetched(fs) == 8 * FILE_BYTES
        fs.cat_file(files[11])  # the reader leaves some out, among them such as are not reached yet
        until(lambda: prefetch.progress.ended)
        assert prefetch.progress.opened == 12


def test_an_endless_order_of_epochs_and_files_that_are_opened_more_than_once(
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
    assert not prefetch._walker.is_alive()


def test_what_cannot_be_fetched_is_told_and_passed_over(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    told: list[tuple[str, Exception]] = []
    paths = [files[0], "/nowhere", files[1]]
    with fs.prefetch(paths, window="1GB", on_error=lambda path, error: told.append((path, error))) as prefetch:
        until(lambda: prefetch.progress.ended)
        assert prefetch.progress.failed == 1
    assert [(path, type(error).__name__) for path, error in told] == [("/nowhere", "ObjectNotFoundError")]
    assert fetched(fs) == 2 * FILE_BYTES


def test_an_order_that_breaks_off_is_told(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    def broken() -> Iterator[str]:
        yield files[0]
        raise RuntimeError("no more")

    told: list[str] = []
    with fs.prefetch(broken(), window="1GB", on_error=lambda _, error: told.append(str(error))) as prefetch:
        until(lambda: prefetch.progress.ended)
    assert told == ["no more"]


def test_a_full_cache_is_not_filled_further(tmp_path: Path, files: list[str]) -> None:
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0, capacity=7 * MB)
    with fs.prefetch(files, window="1GB") as prefetch:
        until(lambda: prefetch.progress.ended)
        progress = prefetch.progress
    assert fs.node.disks()[0][1] <= 7 * MB
    assert progress.unkept_bytes
    assert progress.fetched_bytes <= 7 * MB + 17 * FILE_BYTES  # what was on its way when the first did not fit


@pytest.mark.parametrize("window", [0, 1000, "50%", "much"])
def test_a_window_must_hold_a_block(fs: millrace.MillraceFileSystem, window: int | str) -> None:
    with pytest.raises((UsageError, ConfigurationError), match="window"):
        fs.prefetch(["/x"], window=window)
    with pytest.raises(UsageError, match="one path"):
        fs.prefetch("/x")


def test_close_gives_up_what_was_not_begun_and_hears_nothing_more(
    fs: millrace.MillraceFileSystem, files: list[str]
) -> None:
    prefetch = fs.prefetch(files, window=8 * MB)
    settled(prefetch)
    prefetch.close()
    prefetch.close()
    assert opens.listeners == ()
    before = prefetch.progress
    fs.cat_file(files[0])
    prefetch.advance(files[1])
    assert before.ended
    assert fetched(fs) == 2 * FILE_BYTES
    assert not prefetch._walker.is_alive()


def test_many_threads_read_beside_it_and_every_byte_is_fetched_once(
    fs: millrace.MillraceFileSystem, files: list[str]
) -> None:
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


def test_a_forked_child_reads_on_its_own(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    with fs.prefetch(files, window=8 * MB) as prefetch:
        settled(prefetch)
        child = os.fork()
        if not child:
            good = False
            try:
                prefetch.advance(files[5])
                good = prefetch.progress.ended and opens.listeners == () and len(fs.cat_file(files[3])) == FILE_BYTES
                prefetch.close()
            finally:
                os._exit(0 if good else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert prefetch.progress.opened == 0
        prefetch.advance(files[3])
        until(lambda: prefetch.progress.opened == 4)


# --- orders -------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abc")))
@settings(max_examples=50, deadline=None)
def test_without_repeats(paths: list[str]) -> None:
    assert list(without_repeats(paths)) == [key for key, _ in itertools.groupby(paths)]


def test_a_sampler_gives_what_it_wraps_and_fetches_ahead(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
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


def test_a_sampler_that_is_left_early_leaves_nothing_running(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    before = threading.active_count()
    iterator = iter(PrefetchingSampler(range(FILES), fs, path_of=files.__getitem__, window=8 * MB))
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    until(lambda: threading.active_count() <= before)
    assert threading.active_count() <= before
    assert opens.listeners == ()


def test_following_batches_of_another_process(fs: millrace.MillraceFileSystem, files: list[str]) -> None:
    batches = [{"path": [path]} for path in files]
    for number, batch in enumerate(
        following(batches, files, fs, path_of=lambda batch: batch["path"][-1], window=8 * MB)
    ):
        assert batch is batches[number]
        fs.cat_file(files[number])
        until(lambda number=number: fetched(fs) >= min(FILES, number + 3) * FILE_BYTES)
        assert fetched(fs) <= min(FILES, number + 3) * FILE_BYTES


@pytest.mark.parametrize("reseed", [True, False])
def test_the_order_of_ray(reseed: bool) -> None:
    source = pytest.importorskip("ray.data.datasource.file_based_datasource")
    config = source.FileShuffleConfig(seed=7, reseed_after_execution=reseed)
    paths = [f"b/{number:03}" for number in range(57)]
    for execution in range(3):
        expected, _ = source._shuffle_file_metadata(paths, [None] * 57, config, execution)
        assert ray_file_order(paths, seed=7, execution=execution, reseed_after_execution=reseed) == expected
    assert ray_file_order([], seed=1) == []
