"""Columns of cold Parquet files from a real S3 server: bytes fetched, against the ranges that pyarrow requests."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from tests.support.fork_server import ForkedProcess, node_server

import millrace
from millrace.cache.node import close_nodes
from millrace.filesystem import MillraceFileSystem
from millrace.origin import open_origin
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

COLUMNS, ROWS = 20, 200_000


@pytest.fixture
def region(s3: S3Server) -> Iterator[EmulatedRegion]:
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.01, bytes_per_second=None) as region:
        yield region


@pytest.fixture
def make_fs(s3: S3Server, region: EmulatedRegion, tmp_path: Path) -> Callable[..., MillraceFileSystem]:
    def make(**options: Any) -> MillraceFileSystem:
        target = {**s3.target_options, "endpoint_url": region.endpoint_url}
        return millrace.filesystem(
            "s3", target_options=target, cache_dir=str(tmp_path / "cache"), min_free=0, **options
        )

    return make


class Wide:
    """A Parquet file in the bucket, and what it cost to read it."""

    def __init__(self, region: EmulatedRegion, path: str, table: pa.Table, data: bytes) -> None:
        self.path, self.table, self.data = path, table, data
        self.metadata = pq.read_metadata(io.BytesIO(data))
        self._region = region

    def fetched_bytes(self) -> int:
        return self._region.stats(prefix=f"/{self.path}").bytes_down

    def column_bytes(self, *columns: int) -> int:
        groups = [self.metadata.row_group(number) for number in range(self.metadata.num_row_groups)]
        return sum(group.column(column).total_compressed_size for group in groups for column in columns)


@pytest.fixture(scope="module", params=[20_000, 100_000], ids=["3 MB", "16 MB"])
def table_and_file(request: pytest.FixtureRequest) -> tuple[pa.Table, bytes]:
    """A table, and a file of it with row groups of this size."""
    random = np.random.default_rng(0)
    table = pa.table({f"c{number}": random.integers(0, 1 << 40, ROWS) for number in range(COLUMNS)})
    data = io.BytesIO()
    pq.write_table(table, data, row_group_size=request.param, use_dictionary=False, compression="none")
    return table, data.getvalue()


@pytest.fixture
def wide(s3: S3Server, bucket: str, region: EmulatedRegion, table_and_file: tuple[pa.Table, bytes]) -> Wide:
    table, data = table_and_file
    open_origin("s3", s3.target_options).put(f"{bucket}/wide.parquet", data)
    return Wide(region, f"{bucket}/wide.parquet", table, data)


READ = {
    "read_table": lambda fs, path, columns: pq.read_table(path, columns=columns, filesystem=fs),
    "dataset": lambda fs, path, columns: pads.dataset(path, filesystem=fs).to_table(columns=columns),
    "fsspec file": lambda fs, path, columns: pq.read_table(fs.open(path), columns=columns),
    "no pre-buffer": lambda fs, path, columns: pq.read_table(path, columns=columns, filesystem=fs, pre_buffer=False),
}


@pytest.mark.parametrize("how", READ)
def test_one_column_of_a_cold_file_fetches_little_more_than_the_column(
    make_fs: Callable[..., MillraceFileSystem], wide: Wide, how: str
) -> None:
    fs = make_fs()
    assert READ[how](fs, wide.path, ["c7"]).column("c7") == wide.table.column("c7")
    assert wide.fetched_bytes() <= 1.2 * (wide.column_bytes(7) + (64 << 10))  # with the footer
    first = wide.fetched_bytes()
    assert READ[how](make_fs(), wide.path, ["c7"]).column("c7") == wide.table.column("c7")
    assert wide.fetched_bytes() == first
    whole = pq.read_table(wide.path, filesystem=make_fs())
    assert whole == wide.table
    assert wide.fetched_bytes() <= 1.001 * len(wide.data) + (1 << 16)  # and the headers of the responses


def test_footers_of_objects_of_one_block_in_a_full_cache_are_fetched_alone(
    make_fs: Callable[..., MillraceFileSystem], s3: S3Server, bucket: str, region: EmulatedRegion
) -> None:
    data = io.BytesIO()
    table = pa.table({"a": np.random.default_rng(0).random(300_000)})
    pq.write_table(table, data, row_group_size=20_000, use_dictionary=False, compression="none")
    origin = open_origin("s3", s3.target_options)
    paths = [f"{bucket}/train/{number}.parquet" for number in range(12)]
    for path in paths:
        origin.put(path, data.getvalue())

    def fetched_bytes() -> int:
        return sum(region.stats(prefix=f"/{path}").bytes_down for path in paths)

    def fetched_by(read: Callable[[MillraceFileSystem, str], None]) -> int:
        """Bytes from the origin for one read of every file, as by a new process: what a process holds is dropped."""
        close_nodes()
        before, fs = fetched_bytes(), make_fs(capacity="8MB")
        for path in paths:
            read(fs, path)
        return fetched_bytes() - before

    def read_rows(fs: MillraceFileSystem, path: str) -> None:
        assert pq.read_table(path, filesystem=fs) == table

    def read_footer(fs: MillraceFileSystem, path: str) -> None:
        with fs.open_input_file(path) as file:
            assert pq.read_metadata(file).num_rows == table.num_rows

    whole = fetched_by(read_rows)
    assert whole > 12 * table.nbytes
    assert fetched_by(read_footer) < 12 * (80 << 10)
    assert fetched_by(read_footer) < 12 * 2_000
    assert fetched_by(read_rows) < whole  # some were stored


@pytest.mark.slow
def test_columns_read_by_threads_and_processes_are_fetched_once(
    make_fs: Callable[..., MillraceFileSystem], wide: Wide, s3: S3Server, region: EmulatedRegion, tmp_path: Path
) -> None:
    code = (
        "import sys, millrace, pyarrow.parquet as pq\npath, url, key, secret, cache, column = sys.argv[1:]\n"
        "target = {'key': key, 'secret': secret, 'endpoint_url': url}\n"
        "fs = millrace.filesystem('s3', target_options=target, cache_dir=cache, min_free=0)\n"
        "print(pq.read_table(path, columns=[column], filesystem=fs).column(column).to_numpy().sum())"
    )
    options = s3.target_options
    arguments = [wide.path, region.endpoint_url, options["key"], options["secret"], str(tmp_path / "cache")]
    with contextlib.ExitStack() as running:
        children = []
        for number, name in enumerate(("c3", "c4", "c3")):
            log = tmp_path / f"{number}.log"
            child = ForkedProcess(node_server(), code, *arguments, name, log=log, pipes=True)
            children.append((running.enter_context(child), name))
        fs = make_fs()
        with ThreadPoolExecutor(4) as pool:
            tables = list(pool.map(lambda name: READ["read_table"](fs, wide.path, [name]), ("c3", "c12", "c3", "c4")))
        for table in tables:
            (name,) = table.column_names
            assert table.column(name) == wide.table.column(name)
        for child, name in children:
            assert int(child.output()) == wide.table.column(name).to_numpy().sum()
    assert wide.fetched_bytes() <= 1.2 * (wide.column_bytes(3, 4, 12) + (64 << 10))


@pytest.mark.slow
def test_killed_reader_of_a_column_leaves_right_bytes(
    make_fs: Callable[..., MillraceFileSystem], wide: Wide, s3: S3Server, region: EmulatedRegion, tmp_path: Path
) -> None:
    code = (
        "import sys, os, millrace; path, url, key, secret, cache = sys.argv[1:]\n"
        "target = {'key': key, 'secret': secret, 'endpoint_url': url}\n"
        "fs = millrace.filesystem('s3', target_options=target, cache_dir=cache, min_free=0)\n"
        "file = fs.open_input_file(path)\n"
        "for start in range(100_000, file.size(), 1_000_000):\n"
        "    file.read_at(200_000, start); os.write(1, b'x')"
    )
    options = s3.target_options
    arguments = [wide.path, region.endpoint_url, options["key"], options["secret"], str(tmp_path / "cache")]
    for reads in (1, 5, 20):
        log = tmp_path / "log"
        with ForkedProcess(node_server(), code, *arguments, log=log, pipes=True) as child:
            assert child.stdout.read(reads) == b"x" * reads, log.read_text()
    file = make_fs().open_input_file(wide.path)
    for start in range(100_000, len(wide.data), 1_000_000):
        assert file.read_at(200_000, start) == wide.data[start : start + 200_000]
    assert pq.read_table(wide.path, filesystem=make_fs()) == wide.table
    assert make_fs().cache_counters()["corrupt_blocks"] == 0


def test_file_with_encrypted_columns_is_read(s3: S3Server, bucket: str, tmp_path: Path) -> None:
    """Its footer is not encrypted, so its reader has the columns without a key. In a process of its own: it may abort."""
    keys = (
        "import base64, io, sys, millrace, pyarrow as pa, pyarrow.parquet as pq, pyarrow.parquet.encryption as pe\n"
        "class Keys(pe.KmsClient):\n"
        "    def __init__(self, connection): super().__init__()\n"
        "    def wrap_key(self, key, master): return base64.b64encode(key)\n"
        "    def unwrap_key(self, wrapped, master): return base64.b64decode(wrapped)\n"
        "keys, connection = pe.CryptoFactory(Keys), pe.KmsConnectionConfig()\n"
    )
    write = keys + (
        "table = pa.table({name: range(400_000) for name in 'abc'})\n"
        "wanted = pe.EncryptionConfiguration(footer_key='f', column_keys={'k': ['b']}, plaintext_footer=True)\n"
        "encrypt = keys.file_encryption_properties(connection, wanted)\n"
        "with pq.ParquetWriter(sys.argv[1], table.schema, encryption_properties=encrypt, use_dictionary=False) as file:\n"
        "    file.write_table(table, row_group_size=100_000)"
    )
    path = tmp_path / "encrypted.parquet"
    subprocess.run([sys.executable, "-c", write, str(path)], check=True, timeout=300)
    open_origin("s3", s3.target_options).put(f"{bucket}/encrypted.parquet", path.read_bytes())
    read = keys + (
        "path, url, key, secret, cache = sys.argv[1:]\n"
        "target = {'key': key, 'secret': secret, 'endpoint_url': url}\n"
        "fs = millrace.filesystem('s3', target_options=target, cache_dir=cache, min_free=0)\n"
        "decrypt = keys.file_decryption_properties(connection, pe.DecryptionConfiguration())\n"
        "file = pq.ParquetFile(fs.open_input_file(path), decryption_properties=decrypt)\n"
        "assert file.read(['b', 'c']).column('b').to_pylist() == list(range(400_000))"
    )
    options = s3.target_options
    arguments = [f"{bucket}/encrypted.parquet", s3.endpoint_url, options["key"], options["secret"]]
    command = [sys.executable, "-c", read, *arguments, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
