"""`fs.local_folder` and `millrace files` with a real S3 server: the files, their space, and what happens to them."""

from __future__ import annotations

import filecmp
import json
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import in_child
from tests.support.local_cluster import LocalCluster
from tests.support.waiting import wait_until

import millrace
from millrace.cache.node import close_nodes
from millrace.errors import DiskFullError, ObjectNotFoundError, StorageError, UsageError
from millrace.filesystem import MillraceFileSystem, loading
from millrace.filesystem.folders import LocalFolder
from millrace.origin import ObjectInfo, open_origin
from millrace.store.records import Entry
from millrace.store.store import Store
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

MIB = 1 << 20
SIZES = {
    "config.json": 700,
    "empty": 0,
    "model-00001.safetensors": 9 * MIB + 5,
    "model-00002.safetensors": 4 * MIB,
    "nested/deep/tokenizer.bin": 3 * MIB + 1,
    "nested/merges.txt": 40_000,
}


def content(seed: int = 0) -> dict[str, bytes]:
    return {name: random.Random(f"{seed}{name}").randbytes(size) for name, size in SIZES.items()}


@pytest.fixture
def put(s3: S3Server, bucket: str) -> Callable[..., str]:
    """Writes objects below a prefix, and returns its URL."""

    def put(objects: Mapping[str, bytes], prefix: str = "model") -> str:
        origin = open_origin("s3", s3.target_options)
        for name, data in objects.items():
            origin.put(f"{bucket}/{prefix}/{name}", data)
        return f"s3://{bucket}/{prefix}"

    return put


def assert_equal(path: str, expected: Mapping[str, bytes]) -> None:
    found = {str(each.relative_to(path)): each for each in Path(path).rglob("*") if not each.is_dir()}
    assert found.keys() == expected.keys()
    for name, data in expected.items():
        assert found[name].read_bytes() == data, name


def space(*places: Path | str) -> int:
    """Bytes of the disk that the files below some directories take; each inode once."""
    files = (each for place in places for each in Path(place).rglob("*") if each.is_file() and not each.is_symlink())
    return sum({each.stat().st_ino: each.stat().st_blocks * 512 for each in files}.values())


def test_folder_has_every_object_as_a_read_only_file(put: Callable[..., str], s3_options: dict[str, Any]) -> None:
    url = put(content())
    fs = millrace.filesystem("s3", **s3_options)
    with fs.local_folder(url) as path:
        assert_equal(path, content())
        for each in Path(path).rglob("*"):
            assert not each.is_symlink()
            assert each.is_dir() or stat.S_IMODE(each.stat().st_mode) == 0o444
        large = Path(path, "model-00001.safetensors")
        assert large.stat().st_nlink == 2
        kept = large.open("rb")
    assert not os.path.exists(path)
    assert kept.read() == content()["model-00001.safetensors"]  # an open file stays readable
    kept.close()
    assert fs.cat_file(f"{url}/model-00001.safetensors") == content()["model-00001.safetensors"]


@pytest.mark.parametrize(
    ("selected", "names"),
    [
        ("/", SIZES),
        ("/*.safetensors", ["model-00001.safetensors", "model-00002.safetensors"]),
        ("/nested/**", ["deep/tokenizer.bin", "merges.txt"]),
        ("/nested", ["deep/tokenizer.bin", "merges.txt"]),
        ("/config.json", ["config.json"]),
    ],
)
def test_folder_of_prefix_pattern_or_object_has_relative_names(
    put: Callable[..., str], s3_options: dict[str, Any], selected: str, names: list[str]
) -> None:
    url = put(content())
    fs = millrace.filesystem("s3", **s3_options)
    with fs.local_folder(url + selected) as path:
        found = {str(each.relative_to(path)) for each in Path(path).rglob("*") if not each.is_dir()}
        assert found == set(names)


def test_second_process_reads_nothing_from_the_origin_and_takes_no_space(
    s3: S3Server, put: Callable[..., str], s3_options: dict[str, Any], tmp_path: Path
) -> None:
    large = {name: data for name, data in content().items() if len(data) > MIB}
    url = put(content())
    cache = Path(s3_options["cache_dir"])
    code = (
        "import json, sys, millrace\n"
        "fs = millrace.filesystem('s3', **json.loads(sys.argv[1]))\n"
        "with fs.local_folder(sys.argv[2]) as path:\n"
        "    print(path, flush=True); input()\n"
    )
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        options = {**s3_options, "target_options": {**s3.target_options, "endpoint_url": region.endpoint_url}}
        fs = millrace.filesystem("s3", **options)
        with fs.local_folder(url):
            pass
        before, cached = region.stats().bytes_down, space(cache)
        process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(options), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        assert_equal(path, content())
        copies = sum(-(-len(data) // 4096) * 4096 for data in content().values() if len(data) <= MIB)
        assert space(cache) - cached <= copies + 64 * 1024  # directories, counters
        assert region.stats().bytes_down - before < 20_000  # at most a listing
        hard = sum(os.stat(Path(path, name)).st_blocks * 512 for name in large)
        assert hard <= 1.01 * sum(map(len, large.values())) + 4096 * len(large)
        process.communicate("\n")
        assert process.returncode == 0
        assert not os.path.exists(path)


def test_overwritten_and_removed_objects_do_not_change_an_open_folder(
    s3: S3Server, put: Callable[..., str], s3_options: dict[str, Any], bucket: str
) -> None:
    url = put(content())
    fs = millrace.filesystem("s3", consistency="always", **s3_options)
    with fs.local_folder(url) as path:
        put(content(seed=1))
        fs.rm(f"{bucket}/model/config.json")
        new = {name: data for name, data in content(seed=1).items() if name != "config.json"}
        with fs.local_folder(url) as second:
            assert_equal(second, new)
            assert_equal(path, content())
        assert {name: fs.cat_file(f"{url}/{name}") for name in new} == new
        assert_equal(path, content())


def test_object_overwritten_between_listing_and_load_is_of_one_version(
    s3: S3Server, put: Callable[..., str], s3_options: dict[str, Any]
) -> None:
    url = put(content())
    fs = millrace.filesystem("s3", consistency="immutable", **s3_options)
    fs.find(url)  # the listing stays fresh, and is soon wrong
    put(content(seed=1))
    with fs.local_folder(url) as path:
        assert_equal(path, content(seed=1))


def test_full_cache_evicts_no_object_of_an_open_folder(put: Callable[..., str], s3_options: dict[str, Any]) -> None:
    url = put(content())
    other = put({str(number): os.urandom(4 * MIB) for number in range(12)}, "other")
    capacity = 40 * MIB
    fs = millrace.filesystem("s3", capacity=capacity, **s3_options)
    with fs.local_folder(url) as path:
        for _ in range(3):
            for name in fs.find(other):
                assert len(fs.cat_file(name)) == 4 * MIB
            fs.resize(24 * MIB)
            fs.resize(capacity)
            assert_equal(path, content())
        kept = {found.url for found in fs.cached(url) if found.complete}
        assert {f"{url}/{name}" for name, size in SIZES.items() if size > MIB} <= kept
        assert space(s3_options["cache_dir"] + "/millrace/local/objects") <= capacity
        assert fs.free(url) < 100_000  # only the small ones, which are copied
        assert_equal(path, content())
    assert fs.free(url) > 15 * MIB  # the folder is removed: nothing is kept


def test_folder_larger_than_the_capacity_raises_one_line(put: Callable[..., str], s3_options: dict[str, Any]) -> None:
    url = put(content())
    fs = millrace.filesystem("s3", capacity=8 * MIB, **s3_options)
    with pytest.raises(DiskFullError, match="the cache is too small") as raised, fs.local_folder(url):
        pass
    assert "\n" not in str(raised.value)
    assert list(Path(s3_options["cache_dir"]).glob("millrace/local/folders/*")) == []


def test_missing_url_raises_not_found(s3_options: dict[str, Any], bucket: str) -> None:
    fs = millrace.filesystem("s3", **s3_options)
    with pytest.raises(ObjectNotFoundError, match="does not exist"), fs.local_folder(f"s3://{bucket}/nothing"):
        pass


def test_names_that_cannot_be_files_raise_usage_error(s3_options: dict[str, Any], put: Callable[..., str]) -> None:
    url = put({"a": b"1", "a/b": b"2"})
    fs = millrace.filesystem("s3", **s3_options)
    with pytest.raises(UsageError, match="model/a: cannot be a file, other objects are below it"), fs.local_folder(url):
        pass
    with fs.local_folder(f"{url}/a/") as path:
        assert_equal(path, {"b": b"2"})


def test_folder_on_several_disks_has_links_to_hard_links(
    put: Callable[..., str], s3_options: dict[str, Any], tmp_path: Path
) -> None:
    # By chance all are on one disk: of 20 objects in one of half a million runs.
    objects = {f"{number}.bin": random.Random(number).randbytes(MIB + 4096) for number in range(20)}
    url = put(objects)
    disks = [tmp_path / "one", tmp_path / "two"]
    fs = millrace.filesystem("s3", **{**s3_options, "cache_dir": list(map(str, disks))})
    with fs.local_folder(url) as path:
        assert_equal(path, objects)
        links = [each for each in Path(path).iterdir() if each.is_symlink()]
        assert 0 < len(links) < len(objects)
        assert all(each.stat().st_nlink == 2 for each in Path(path).iterdir())
    for disk in disks:
        assert list(disk.glob("millrace/local/folders/*")) == []


# --- millrace files -------------------------------------------------------------------------------------


@pytest.fixture
def files(s3: S3Server, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": s3.key,
        "AWS_SECRET_ACCESS_KEY": s3.secret,
        "AWS_ENDPOINT_URL": s3.endpoint_url,
        "MILLRACE_CACHE_DIR": str(tmp_path / "cache"),
        "MILLRACE_MIN_FREE": "0",
    }

    def run(*arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "millrace.cli", "files", *map(str, arguments)],
            env={**environment, **more},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_files_command_keeps_the_directory_until_it_is_deleted(
    put: Callable[..., str],
    files: Callable[..., subprocess.CompletedProcess[str]],
    s3_options: dict[str, Any],
    tmp_path: Path,
) -> None:
    url, target = put(content()), tmp_path / "model"
    done = files(url, target, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    linked = sum(size for size in SIZES.values() if size > MIB)
    assert (report["objects"], report["linked_bytes"]) == (len(SIZES), linked)
    assert report["copied_bytes"] + linked == report["fetched_bytes"] == sum(SIZES.values())
    assert_equal(str(target), content())
    fs = millrace.filesystem("s3", capacity=linked + MIB, **s3_options)
    assert fs.free(url) < 100_000
    again = files(url, tmp_path / "other")
    assert " 40.7 kB fetched" in again.stdout, (again.stdout, again.stderr)
    refused = files(url, target)
    assert refused.returncode == 1
    assert refused.stderr == f"millrace: {target}: is not empty: choose a new or empty directory, or delete it first\n"
    for place in (target, tmp_path / "other"):
        for each in place.rglob("*"):
            if each.is_file():
                each.unlink()
    assert fs.cat_file(f"{url}/model-00002.safetensors") == content()["model-00002.safetensors"]
    assert fs.free(url) == linked + sum(size for size in SIZES.values() if size <= MIB)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write to a read-only file")
def test_get_into_a_directory_of_files_replaces_them_and_keeps_the_cache(
    put: Callable[..., str], s3_options: dict[str, Any], tmp_path: Path
) -> None:
    url, target = put(content()), tmp_path / "model"
    fs = millrace.filesystem("s3", **s3_options)
    with fs.local_folder(url, directory=target):
        pass
    with fs.open(f"{url}/model-00002.safetensors") as mapped:
        fs.get(f"{url}/model-00001.safetensors", str(target / "model-00002.safetensors"))
        assert mapped.read() == content()["model-00002.safetensors"]
    with pytest.raises(ObjectNotFoundError):
        fs.get_file(f"{url}/missing", str(target / "model-00001.safetensors"))
    assert (target / "model-00001.safetensors").stat().st_nlink == 2
    fs.get(f"{url}/", f"{target}/", recursive=True)
    assert_equal(str(target), content())


def test_files_command_on_another_file_system_needs_copies(
    put: Callable[..., str], files: Callable[..., subprocess.CompletedProcess[str]], small_disk: Path
) -> None:
    url = put({"a.bin": bytes(2 * MIB), "b.txt": b"small"})
    refused = files(url, small_disk / "model")
    assert refused.returncode == 1
    assert "is on another file system than the cache in" in refused.stderr
    assert "--copy" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert list(small_disk.iterdir()) == []
    done = files(url, small_disk / "model", "--copy")
    assert done.returncode == 0, done.stderr
    assert_equal(str(small_disk / "model"), {"a.bin": bytes(2 * MIB), "b.txt": b"small"})
    put({"c.bin": os.urandom(15 * MIB)})
    full = files(url, small_disk / "second", "--copy", MILLRACE_CONSISTENCY="always")
    assert full.returncode == 3
    assert "no space for a copy of" in full.stderr
    assert not (small_disk / "second").exists()


def test_files_command_with_a_full_cache_exits_with_3_and_leaves_nothing(
    put: Callable[..., str], files: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    url = put(content())
    done = files(url, tmp_path / "model", MILLRACE_CAPACITY="8MB")
    assert done.returncode == 3
    assert done.stderr.startswith("millrace: the cache is too small: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "model").exists()


# --- native programs ------------------------------------------------------------------------------------


def test_safe_open_and_from_pretrained_read_the_folder(
    s3: S3Server, bucket: str, s3_options: dict[str, Any], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=2, n_embd=256, n_head=4, vocab_size=2000, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    saved = tmp_path / "saved"
    model.save_pretrained(saved)
    origin = open_origin("s3", s3.target_options)
    for each in saved.iterdir():
        origin.put(f"{bucket}/gpt/{each.name}", each.read_bytes())
    fs: MillraceFileSystem = millrace.filesystem("s3", **s3_options)
    with fs.local_folder(f"s3://{bucket}/gpt") as path:
        assert not filecmp.dircmp(saved, path).diff_files
        with safetensors.safe_open(f"{path}/model.safetensors", "pt") as opened:
            state = model.state_dict()
            for name in opened.keys():  # noqa: SIM118 - not a dict
                assert torch.equal(opened.get_tensor(name), state[name])
        loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    inputs = torch.arange(10).reshape(1, 10)
    assert torch.equal(loaded(inputs).logits, model.eval()(inputs).logits)


def test_directory_on_unusable_path_raises_one_line(put: Callable[..., str], s3_options: dict[str, Any]) -> None:
    url = put({"a.txt": b"a"})
    fs = millrace.filesystem("s3", **s3_options)
    for error, place in ((UsageError, "/etc/hostname"), (StorageError, "/proc/model")):
        with pytest.raises(error, match=place) as raised, fs.local_folder(url, directory=place):
            pass
        assert "\n" not in str(raised.value)


def test_full_cache_makes_room_for_a_folder(put: Callable[..., str], s3_options: dict[str, Any]) -> None:
    """A load alone does not evict objects that are as useful as its own."""
    other = put({str(number): os.urandom(4 * MIB) for number in range(8)}, "other")
    url = put(content())
    fs = millrace.filesystem("s3", capacity=34 * MIB, **s3_options)
    for _ in range(3):
        for name in fs.find(other):
            fs.cat_file(name)
    with pytest.raises(DiskFullError):
        fs.load(url)
    with fs.local_folder(url) as path:
        assert_equal(path, content())
    assert space(s3_options["cache_dir"] + "/millrace/local/objects") <= 34 * MIB


def test_folder_next_to_another_one_of_the_same_objects_loads_them_once(
    put: Callable[..., str], s3_options: dict[str, Any]
) -> None:
    other = put({str(number): os.urandom(4 * MIB) for number in range(8)}, "other")
    url = put(content())
    fs = millrace.filesystem("s3", capacity=34 * MIB, **s3_options)
    fs.pin(other)

    def use_and_need_the_space(_: object) -> None:
        with fs.local_folder(url):
            pass
        with suppress(DiskFullError):
            fs.load(other)

    with LocalFolder(fs, url, progress=use_and_need_the_space) as folder:
        assert_equal(folder.path, content())
        assert folder.fetched_bytes == sum(SIZES.values())


def test_folder_on_a_node_of_a_cluster_has_the_bytes_of_its_peers(
    s3: S3Server, put: Callable[..., str], bucket: str, tmp_path: Path
) -> None:
    url = put(content())
    with EmulatedRegion(s3.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as region:
        options = {**s3.target_options, "endpoint_url": region.endpoint_url}
        with LocalCluster(tmp_path / "cluster", 3, target_options=options) as cluster:
            paths = []
            for node in cluster.nodes:
                fs = millrace.filesystem("s3", **cluster.arguments(node))
                with fs.local_folder(url) as path:
                    assert path.startswith(str(node.cache_dir))
                    assert_equal(path, content())
                    paths.append(path)
            fetched = region.stats(f"/{bucket}/").by_kind["GET"].bytes_down
            assert fetched == sum(SIZES.values())
            assert not any(map(os.path.exists, paths))


# --- what may go wrong ----------------------------------------------------------------------------------

OWNER = """
import sys, time, millrace
fs = millrace.filesystem("file", cache_dir=sys.argv[1], min_free=0)
with fs.local_folder(sys.argv[2]) as path:
    print(path, flush=True)
    time.sleep(3600)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The objects as local files, which are an origin as well."""
    for name, data in content().items():
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "model"


def test_folder_of_a_killed_process_is_removed_by_the_next_one(
    make: Callable[..., MillraceFileSystem], model: Path, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "cache"), str(model)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert_equal(str(path), content())
        fs = make()
        with fs.local_folder(str(model)) as mine:
            owner.kill()
            owner.wait()
            wait_until(lambda: not path.exists())
            assert_equal(mine, content())
    large = sum(size for size in SIZES.values() if size > MIB)
    assert fs.free(str(model)) >= large


def test_damaged_cached_object_is_fetched_again_for_a_folder(
    make: Callable[..., MillraceFileSystem], model: Path, tmp_path: Path
) -> None:
    make().load(str(model))
    close_nodes()
    for number, path in enumerate((tmp_path / "cache").glob("millrace/local/objects/*/*[0-9]")):
        with open(path, "r+b") as file:
            file.seek(number * MIB)
            file.write(b"damage")
    fs = make()
    with fs.local_folder(str(model)) as path:
        assert_equal(path, content())
    assert fs.cache_counters()["corrupt_blocks"] == 3


def test_failed_folder_leaves_nothing(make: Callable[..., MillraceFileSystem], model: Path, tmp_path: Path) -> None:
    fs = make()

    def fail(_: object) -> None:
        raise RuntimeError("the caller ends the load")

    (tmp_path / "there").mkdir()
    for directory in (None, tmp_path / "new", tmp_path / "there"):
        with pytest.raises(RuntimeError), fs.local_folder(str(model), directory=directory, progress=fail):
            pass
    assert not (tmp_path / "new").exists()
    assert list((tmp_path / "there").iterdir()) == []
    assert list((tmp_path / "cache").glob("millrace/local/folders/*")) == []
    with pytest.raises(ValueError, match="inside"), fs.local_folder(str(model)) as path:
        raise ValueError("inside")
    assert not os.path.exists(path)


def test_folder_is_complete_after_a_full_disk_ended_the_listing(
    make: Callable[..., MillraceFileSystem], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fs, select, open_data, is_full = make(), loading.select, Store.open_data, [True]

    def select_slowly(*arguments: Any) -> Iterator[ObjectInfo]:
        for info in sorted(select(*arguments), key=lambda info: -info.size):
            yield info
            time.sleep(0.3)  # until the error of the first one has ended the load

    def open_when_free(store: Store, entry: Entry) -> int:
        if is_full:
            is_full.clear()
            raise DiskFullError("no space left on the disk")
        return open_data(store, entry)

    monkeypatch.setattr(loading, "select", select_slowly)
    monkeypatch.setattr(Store, "open_data", open_when_free)
    with fs.local_folder(str(model)) as path:
        assert_equal(path, content())


def test_second_caller_with_the_same_directory_is_refused_and_removes_nothing(
    make: Callable[..., MillraceFileSystem], model: Path, tmp_path: Path
) -> None:
    fs, target, refused = make(), tmp_path / "there", []

    def begin_again(_: object) -> None:
        if not refused:
            with pytest.raises(UsageError, match="another process fills it") as error:
                fs.local_folder(str(model), directory=target).__enter__()
            refused.append(error)

    with fs.local_folder(str(model), directory=target, progress=begin_again):
        pass
    assert refused
    assert {path.name for path in target.rglob("*")} == {path.name for path in model.rglob("*")}
    with pytest.raises(UsageError, match="is not empty"), fs.local_folder(str(model), directory=target):
        pass


def test_forked_child_that_leaves_the_block_removes_nothing(
    make: Callable[..., MillraceFileSystem], model: Path
) -> None:
    folder = make().local_folder(str(model))
    path = folder.__enter__()

    def leave() -> str:
        folder.__exit__(None, None, None)
        return "left"

    assert in_child(leave) == "left"
    assert_equal(path, content())
    folder.__exit__(None, None, None)
    assert not os.path.exists(path)
