"""DEBUG shows the source and the duration of each read, and one id links a read to its request at the origin."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

import millrace

BLOCK = 1 << 20
SIZES = [30_000, 3 * BLOCK]


@pytest.mark.parametrize("size", SIZES)
def test_cold_read_is_linked_to_its_origin_request(
    size: int, bucket: str, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    fs = millrace.filesystem("s3", **s3_options)
    fs.pipe_file(f"{bucket}/key", b"x" * size)
    caplog.set_level(logging.DEBUG, "millrace")
    with fs.open(f"{bucket}/key") as file:
        file.read()
    text = caplog.text
    waited = set(re.findall(r"waited \d\.\d+ s for missing blocks \(fetch ([\w-]+)\)", text))
    fetched = set(re.findall(r"from the origin in \d\.\d+ s \(fetch ([\w-]+)\)", text))
    requested = set(re.findall(r"a request took \d\.\d+ s, .* \(fetch ([\w-]+)\)", text))
    assert waited
    assert waited <= fetched
    assert waited <= requested


def test_warm_reads_log_their_source(bucket: str, s3_options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    native, checked = (millrace.filesystem("s3", **s3_options, native=native) for native in (True, False))
    native.pipe_file(f"{bucket}/key", b"x" * 30_000)
    caplog.set_level(logging.DEBUG, "millrace")
    native.cat_file(f"{bucket}/key")
    for _ in range(3):
        native.cat_file(f"{bucket}/key")
    assert len(re.findall(r"key: all 30000 bytes mapped in \d\.\d+ s", caplog.text)) == 3
    checked.cat_file(f"{bucket}/key")
    assert re.search(r"key: bytes 0 to 30000 from disk in \d\.\d+ s", caplog.text)
