import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

import millrace
from millrace.errors import ConfigurationError
from millrace.filesystem.files import CachedFile

MakeFileSystem = Callable[..., millrace.MillraceFileSystem]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    (directory / "sub" / "deeper").mkdir(parents=True)
    table = pa.table({"a": list(range(100_000)), "b": [f"row {i}" for i in range(100_000)]})
    pq.write_table(table, directory / "one.parquet", row_group_size=10_000)
    pq.write_table(table.slice(0, 10), directory / "sub" / "two.parquet")
    (directory / "sub" / "deeper" / "odd name #1 %41 ä.txt").write_bytes(b"odd")
    return directory


def test_file_system_is_an_fsspec_and_a_pyarrow_file_system(make: MakeFileSystem) -> None:
    fs = make()
    assert isinstance(fs, fsspec.AbstractFileSystem)
    assert isinstance(fs, pafs.FileSystem)
    assert isinstance(fs.handler, pafs.FSSpecHandler)
    assert fs.protocol[0] == "millrace"


def test_s3_is_among_the_protocols_but_not_the_first() -> None:
    fs = millrace.filesystem("s3", target_options={"anon": True})
    assert "s3" in fs.protocol
    assert fs.protocol[0] != "s3"


def test_fsspec_opens_the_registered_protocol(tmp_path: Path) -> None:
    fs = fsspec.filesystem("millrace", target_protocol="file", cache_dir=str(tmp_path))
    assert isinstance(fs, millrace.MillraceFileSystem)


def test_file_system_without_target_raises() -> None:
    with pytest.raises(ConfigurationError, match="target_protocol"):
        fsspec.filesystem("millrace")
    with pytest.raises(ConfigurationError, match="target_protocol"):
        fsspec.open("millrace://bucket/key").open()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_options": {"sekret": "x"}}, "'sekret': is 'secret' meant.*known ones are.*secret"),
        ({"target_options": {"key": "x"}}, "belong together"),
        ({"capcity": 3}, "'capcity': is 'capacity' meant.*known ones are.*capacity"),
        ({"key": "x", "secret": "y"}, "'key', 'secret': known ones.*those of the storage.*go into target_options"),
    ],
)
def test_invalid_options_raise(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        millrace.filesystem("s3", **options)


def test_unknown_protocol_raises_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"'gopher'.*s3"):
        millrace.filesystem("gopher")


def test_secrets_are_not_in_the_repr() -> None:
    fs = millrace.filesystem("s3", target_options={"key": "AK", "secret": "hush", "endpoint_url": "http://127.0.0.1:1"})
    assert "hush" not in repr(fs)
    assert "127.0.0.1" in repr(fs)


def test_parquet_is_read_through_each_interface(make: MakeFileSystem, data: Path) -> None:
    fs = make()
    expected = pq.read_table(data / "one.parquet")
    path = f"{data}/one.parquet"
    for _ in range(2):  # cold, then native
        assert pq.read_table(path, filesystem=fs).equals(expected)
        assert (
            pads.dataset(str(data), filesystem=fs, format="parquet", exclude_invalid_files=True).count_rows() == 100_010
        )
        with fs.open(path) as file:
            assert pq.read_table(file).equals(expected)
        assert pd.read_parquet(path, filesystem=fs)["a"].sum() == sum(range(100_000))
    assert isinstance(fs.open_input_file(path), pa.BufferReader)
    chained = pd.read_parquet(
        f"millrace::file://{path}",
        storage_options={"millrace": {"cache_dir": str(data.parent / "cache"), "min_free": 0}},
    )
    assert len(chained) == 100_000


def test_file_objects_read_and_seek(make: MakeFileSystem, tmp_path: Path) -> None:
    content = os.urandom(9 << 20)
    (tmp_path / "f.bin").write_bytes(content)
    fs = make()
    with fs.open(f"{tmp_path}/f.bin") as file:
        assert file.seekable()
        assert file.read(10) == content[:10]
        assert file.seek(-5, 2) == len(content) - 5
        assert file.read() == content[-5:]
        assert file.read() == b""
        file.seek(5 << 20)
        target = bytearray(100)
        assert file.readinto(target) == 100
        assert bytes(target) == content[5 << 20 : (5 << 20) + 100]
        with pytest.raises(ValueError, match="negative"):
            file.seek(-1)
    with pytest.raises(ValueError, match="closed"):
        file.read()
    with fs.open_input_stream(f"{tmp_path}/f.bin") as stream:
        assert stream.read() == content
    assert fs.cat_file(f"{tmp_path}/f.bin", 3, 9) == content[3:9]
    assert fs.cat_file(f"{tmp_path}/f.bin", -4) == content[-4:]


@pytest.mark.parametrize("is_cached", [False, True])
@pytest.mark.parametrize("size", [10, 9 << 20])
@pytest.mark.parametrize("position", [0, 5, 10 << 20])
def test_closed_file_raises_value_error(
    make: MakeFileSystem, tmp_path: Path, size: int, is_cached: bool, position: int
) -> None:
    (tmp_path / "f.bin").write_bytes(bytes(size))
    fs = make()
    if is_cached:
        fs.load(tmp_path / "f.bin")
    for opened in (fs.open, fs.open_input_file, fs.open_input_stream):
        file = opened(f"{tmp_path}/f.bin")
        if file.seekable():
            file.seek(position)
        file.close()
        for call in (file.read, file.tell, lambda file=file: file.read(1)):
            with pytest.raises(ValueError, match="closed"):
                call()


def test_compressed_stream_is_decompressed_like_pyarrow(make: MakeFileSystem, tmp_path: Path) -> None:
    with pa.CompressedOutputStream(str(tmp_path / "x.csv.gz"), "gzip") as out:
        out.write(b"a,b\n1,2\n")
    fs = make()
    assert fs.open_input_stream(f"{tmp_path}/x.csv.gz").read() == b"a,b\n1,2\n"
    assert fs.open_input_stream(f"{tmp_path}/x.csv.gz", compression=None).read()[:2] == b"\x1f\x8b"


def test_listing_and_info_return_the_files(make: MakeFileSystem, data: Path) -> None:
    fs = make()
    base = str(data)
    assert fs.ls(str(data), detail=False) == [f"{base}/one.parquet", f"{base}/sub"]
    odd = f"{base}/sub/deeper/odd name #1 %41 ä.txt"
    assert fs.find(str(data)) == sorted([f"{base}/one.parquet", odd, f"{base}/sub/two.parquet"])
    assert fs.cat_file(odd) == b"odd"
    assert fs.isdir(f"{data}/sub")
    assert fs.isfile(odd)
    assert not fs.exists(f"{data}/nothing")
    with pytest.raises(FileNotFoundError):
        fs.info(f"{data}/nothing")
    with pytest.raises(FileNotFoundError):
        fs.ls(f"{data}/nothing")
    with pytest.raises(FileNotFoundError):
        fs.open(f"{data}/nothing")
    infos = {info.path: info for info in fs.get_file_info(pafs.FileSelector(str(data), recursive=True))}
    assert set(infos) == {f"{base}/one.parquet", f"{base}/sub", f"{base}/sub/two.parquet", f"{base}/sub/deeper", odd}
    assert infos[odd].size == 3
    assert infos[f"{base}/sub"].type == pafs.FileType.Directory
    with pytest.raises(FileNotFoundError):
        fs.get_file_info(pafs.FileSelector(f"{data}/nothing"))
    assert fs.get_file_info(pafs.FileSelector(f"{data}/nothing", allow_not_found=True)) == []
    assert fs.get_file_info([f"{data}/nothing"])[0].type == pafs.FileType.NotFound
    with pytest.raises(NotADirectoryError):
        fs.get_file_info(pafs.FileSelector(f"{data}/one.parquet"))
    with pytest.raises(FileNotFoundError):
        fs.open_input_file(f"{data}/nothing")


def test_write_is_visible_to_next_read(make: MakeFileSystem, tmp_path: Path) -> None:
    fs = make(consistency="immutable")
    path = f"{tmp_path}/w/x.bin"
    fs.pipe_file(path, b"one")
    assert fs.cat_file(path) == b"one"
    with fs.open(path, "wb") as file:
        file.write(b"two")
        file.write(b"!")
    assert fs.cat_file(path) == b"two!"
    with fs.open_output_stream(path) as stream:
        stream.write(b"three")
    assert fs.cat_file(path) == b"three"
    fs.rm(path)
    assert not fs.exists(path)
    with pytest.raises(FileNotFoundError):
        fs.rm(path)


def test_failed_write_leaves_no_object(make: MakeFileSystem, tmp_path: Path) -> None:
    fs = make()

    def write_half() -> None:
        with fs.open(f"{tmp_path}/half.bin", "wb") as file:
            file.write(b"x" * (40 << 20))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert not (tmp_path / "half.bin").exists()


def test_overwritten_file_with_expired_metadata_is_fetched_again(make: MakeFileSystem, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"old")
    fs = make(consistency="always")
    assert fs.cat_file(str(path)) == b"old"
    path.write_bytes(b"newer")
    assert fs.cat_file(str(path)) == b"newer"
    assert len(fs.node.entries()) == 1  # the old version was given up


def test_file_system_of_a_data_set_equals_the_one_that_it_was_made_with(make: MakeFileSystem, data: Path) -> None:
    fs, other = make(), make(consistency="immutable")
    found = pads.dataset(f"{data}/one.parquet", filesystem=fs).filesystem
    assert fs.equals(found)
    assert fs == found
    assert found == fs
    assert not other.equals(found)
    assert not fs.equals(pads.dataset(f"{data}/one.parquet").filesystem)


def test_unpickled_file_system_works_in_another_process(make: MakeFileSystem, data: Path, tmp_path: Path) -> None:
    fs = make()
    assert pickle.loads(pickle.dumps(fs)) == fs
    (tmp_path / "fs.pickle").write_bytes(pickle.dumps(fs))
    code = (
        "import pickle, sys, pyarrow.parquet as pq; fs = pickle.load(open(sys.argv[1], 'rb'));"
        "print(pq.read_table(sys.argv[2], filesystem=fs).num_rows, fs.cache_counters()['origin_bytes'])"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "fs.pickle"), f"{data}/one.parquet"]
    pq.read_table(f"{data}/one.parquet", filesystem=fs)
    origin_bytes = fs.cache_counters()["origin_bytes"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["100000", str(origin_bytes)]  # another process reads the fetched bytes


def test_file_system_in_forked_child_continues(make: MakeFileSystem, data: Path) -> None:
    fs = make()
    path = f"{data}/one.parquet"
    size = fs.info(path)["size"]
    fs.cat_file(path)
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                grandchild = os.fork()
                if grandchild == 0:
                    os._exit(0 if len(fs.cat_file(path)) == size else 2)
                inner = os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
                ok = len(fs.cat_file(path)) == size and len(fs.cat_file(f"{data}/sub/two.parquet")) > 0
                code = 0 if ok and inner == 0 else 3
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert len(fs.cat_file(path)) == size


def test_processes_fetch_a_block_once(tmp_path: Path) -> None:
    size = 40 << 20
    (tmp_path / "big.bin").write_bytes(os.urandom(size))
    code = (
        "import sys, millrace; fs = millrace.filesystem('file', cache_dir=sys.argv[1], min_free=0);"
        "print('up', flush=True); sys.stdin.read(1); data = fs.cat_file(sys.argv[2]); import zlib; print(zlib.crc32(data))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), f"{tmp_path}/big.bin"]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("x")
        process.stdin.flush()
    outputs = [process.communicate()[0] for process in processes]
    assert len(set(outputs)) == 1
    assert outputs[0].strip()
    fs = millrace.filesystem("file", cache_dir=str(tmp_path / "cache"), min_free=0)
    assert fs.cache_counters()["origin_bytes"] == size


def test_import_loads_no_heavy_modules() -> None:
    code = "import sys, millrace; print(sorted({'torch', 'ray', 'botocore', 'pandas', 'click'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_process_with_cached_data_imports_only_what_it_needs(make: MakeFileSystem, data: Path, tmp_path: Path) -> None:
    # Ray starts workers for every epoch; their imports before the first byte are on the epoch's critical path.
    fs, path = make(), f"{data}/one.parquet"
    fs.cat_file(path)
    (tmp_path / "pickled").write_bytes(pickle.dumps(fs))
    code = (
        "import pickle, sys; fs = pickle.load(open(sys.argv[1], 'rb')); fs.open_input_file(sys.argv[2]).read();"
        "print(sorted({'obstore', 'tomllib', 'millrace.cache.rebuild', 'millrace.filesystem.loading',"
        "'millrace.filesystem.prefetching'} & set(sys.modules)), fs.cache_counters()['origin_requests'])"
    )
    before = fs.cache_counters()["origin_requests"]
    command = [sys.executable, "-c", code, str(tmp_path / "pickled"), path]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == f"[] {before}\n"


@pytest.mark.parametrize("size", [40_000, 2_000_000])
def test_file_opened_before_the_fetch_reads_the_object(tmp_path: Path, make: MakeFileSystem, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "object").write_bytes(data)
    fs, other = make(), make()
    info = fs.describe(str(tmp_path / "object"))
    reader = fs.node.open_reader(fs.origin, info)
    other.cat_file(str(tmp_path / "object"))  # brings it here
    other.cat_file(str(tmp_path / "object"))
    with CachedFile(reader, path=info.key, sequential=False, on_changed=lambda: None) as file:
        target = bytearray(size)
        assert file.readinto(target) == size
        assert bytes(target) == data
