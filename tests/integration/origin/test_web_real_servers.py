"""Third-party servers: Python's own (no ranges, no tags, an index page), and an S3 server behind signed addresses."""

import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from urllib.error import URLError

import obstore
import pytest
from obstore.store import S3Store
from tests.support.ports import reserved_port

from millrace.errors import DeniedError, ObjectChangedError, ObjectNotFoundError, UsageError
from millrace.origin import open_origin
from millrace.testing.process import ChildProcess
from millrace.testing.s3 import S3Server

DATA = bytes(i * 7 % 256 for i in range(300_000))


@pytest.fixture
def python_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """`python -m http.server`, and the directory that it shows."""
    folder = tmp_path / "shown"
    folder.mkdir()
    with reserved_port() as port:
        command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1", "--directory", str(folder)]
        with ChildProcess(command, log=tmp_path / "log"):
            deadline = time.monotonic() + 120
            while True:
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=300).close()
                    break
                except URLError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
            yield f"127.0.0.1:{port}", folder


def test_pythons_server_is_read_and_listed(python_server: tuple[str, Path]) -> None:
    host, folder = python_server
    names = ["a b.bin", "sub/deep/ü.bin", "sub/100%.bin", "sub-x/y#z?.bin", "z.bin"]
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(DATA + name.encode())
    origin = open_origin("http")
    found = [info for page in origin.list_all(host) for info in page]
    assert [info.key.partition("/")[2] for info in found] == [
        "a b.bin", "sub-x/y%23z%3F.bin", "sub/100%25.bin", "sub/deep/ü.bin", "z.bin",
    ]  # fmt: skip
    for info in found:
        assert info == origin.head(info.key)
        assert bytes(origin.read(info.key, 5, 50, version=info.version)) == DATA[5:50]
        tail = bytes(origin.read(info.key, len(DATA), info.size, version=info.version)).decode()
        assert tail in names
    assert list(origin.list_level(f"{host}/sub").prefixes) == [f"{host}/sub/deep"]
    with pytest.raises(ObjectNotFoundError):
        origin.head(f"{host}/sub")
    with pytest.raises(ObjectNotFoundError):
        origin.head(f"{host}/none")
    (folder / "z.bin").write_bytes(b"short")
    with pytest.raises(ObjectChangedError):
        open_origin("http").read(f"{host}/z.bin", 0, 5, version=found[-1].version)


def test_signed_address_of_an_object_store_is_read(s3: S3Server, bucket: str) -> None:
    """Signed for GET only, so HEAD is refused; with ranges, strong tags and `If-Match`."""
    options = s3.target_options
    store = S3Store(
        bucket,
        endpoint=s3.endpoint_url,
        access_key_id=options["key"],
        secret_access_key=options["secret"],
        region="us-east-1",
        client_options={"allow_http": True},
    )
    obstore.put(store, "folder/x y.bin", DATA)
    key = obstore.sign(store, "GET", "folder/x y.bin", timedelta(minutes=5)).partition("://")[2]
    origin = open_origin("http")
    info = origin.head(key)
    assert (info.size, info.key) == (len(DATA), key)
    assert info.version.startswith('"')
    for start, stop in ((0, 1), (100, 200_000), (len(DATA) - 1, len(DATA)), (0, len(DATA))):
        assert bytes(origin.read(key, start, stop, version=info.version)) == DATA[start:stop]
    with pytest.raises(UsageError):
        origin.read(key, 0, len(DATA) + 1, version=info.version)
    obstore.put(store, "folder/x y.bin", DATA[::-1])
    with pytest.raises(ObjectChangedError):
        origin.read(key, 0, 10, version=info.version)
    with pytest.raises(DeniedError) as caught:
        origin.head(key.replace("X-Amz-Signature=", "X-Amz-Signature=0"))
    assert "Signature" not in str(caught.value)
