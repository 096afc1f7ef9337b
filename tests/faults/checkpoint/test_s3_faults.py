"""An object store that fails, stalls, loses answers and dies in the middle of a save or a load."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.support.failures import failure_of
from tests.support.impatience import impatient
from torch.distributed.checkpoint.api import CheckpointException

from millrace.checkpoint import CheckpointReader, CheckpointWriter
from millrace.checkpoint.storage.storage import open_storage
from millrace.errors import (
    CorruptCheckpointError,
    DeniedError,
    MillraceError,
    ObjectExistsError,
    OriginUnavailableError,
    OutcomeUnknownError,
)
from millrace.origin import store_access
from millrace.origin.base import LimitedOrigin
from millrace.origin.limits import retrying
from millrace.origin.limits.retrying import Patience
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MANIFEST = "*/manifest.millrace"
DATA = "*/data-*"
# Of noise, so that they go up as two parts.
NBYTES = 20 << 20


@pytest.fixture
def region(runs_server):
    with EmulatedRegion(runs_server.endpoint_url, round_trip_seconds=0.0, bytes_per_second=None) as running:
        yield running


@pytest.fixture
def options(runs_server, region):
    return {**runs_server.target_options, "endpoint_url": region.endpoint_url}


def state(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=generator),
        "step": torch.tensor(seed),
    }


def save(seed: int, url: str, options: dict, **more) -> None:
    dcp.save(state(seed), storage_writer=CheckpointWriter(url, target_options=options, **more))


def error_of(call, *args, **more) -> BaseException:
    failure = failure_of(call, *args, **more)
    assert isinstance(failure, MillraceError), repr(failure)
    assert "\n" not in str(failure)
    assert failure.next_step
    return failure


def load(url: str, options: dict) -> dict:
    loaded = {"w": torch.zeros(NBYTES, dtype=torch.uint8), "step": torch.tensor(-1)}
    dcp.load(loaded, storage_reader=CheckpointReader(url, target_options=options))
    return loaded


def assert_holds(seed: int, url: str, options: dict) -> None:
    loaded = load(url, options)
    assert loaded["step"] == seed
    assert torch.equal(loaded["w"], state(seed)["w"])


def names(url: str, options: dict) -> list[str]:
    return sorted(open_storage(url, options).names())


# --- saving ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_short_failures_are_retried(region, options):
    url = "s3://runs/hiccups"
    for path in (DATA, MANIFEST):
        region.fail("status", method="PUT", path=path, status=503, count=2)
        region.fail("reset", method="PUT", path=path)
    region.fail("status", method="POST", path=DATA, status=500)
    save(1, url, options)
    assert region.fault_hits() == [2, 1, 2, 1, 1]
    assert_holds(1, url, options)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["every part", "the last part", "completing"])
def test_permanently_failing_storage_fails_the_save(runs_server, region, options, what):
    url = f"s3://runs/failing-{what.replace(' ', '-')}"
    save(1, url, runs_server.target_options)
    before = names(url, runs_server.target_options)
    if what == "completing":
        region.fail("status", method="POST", path=DATA, status=503, count=None, skip=1)
    else:
        region.fail("status", method="PUT", path=DATA, count=None, skip=1 if what == "the last part" else 0)
    with impatient(is_silent=False):
        assert isinstance(error_of(save, 2, url, options), OriginUnavailableError)
    assert names(url, runs_server.target_options) == before
    assert_holds(1, url, runs_server.target_options)


@pytest.mark.slow
def test_stalling_storage_fails_the_save_in_bounded_time(runs_server, region, options):
    url = "s3://runs/stalling"
    save(1, url, runs_server.target_options)
    region.fail("stall", method="PUT", path=DATA, seconds=600, count=None)
    began = time.monotonic()
    with impatient():
        assert isinstance(error_of(save, 2, url, options), OriginUnavailableError)
    assert time.monotonic() - began < 300
    assert_holds(1, url, runs_server.target_options)


@pytest.mark.slow
def test_manifest_with_lost_answer_is_found_afterwards(runs_server, region, options, monkeypatch):
    url = "s3://runs/stalling-manifest"
    region.fail("stall", method="PUT", path=MANIFEST, seconds=600, count=None)
    began, put = time.monotonic(), LimitedOrigin.put

    def put_impatiently(*arguments, **more):
        with monkeypatch.context() as impatiently:
            impatiently.setattr(retrying, "PATIENCE", Patience(seconds=4, tries=3))
            return put(*arguments, **more)

    with monkeypatch.context() as patched:
        # All other requests are made as often as usual: the machine may be as slow as the storage.
        patched.setitem(store_access.CLIENT, "read_timeout", timedelta(seconds=1))
        patched.setattr(LimitedOrigin, "put", put_impatiently)
        save(1, url, options)
    assert region.fault_hits()[0] > 0
    assert time.monotonic() - began < 300
    assert_holds(1, url, runs_server.target_options)


@pytest.mark.slow
def test_server_killed_during_upload_fails_the_save(tmp_path):
    with S3Server(tmp_path) as server:
        server.create_bucket("runs")
        url, direct = "s3://runs/dying", server.target_options
        save(1, url, direct)
        with EmulatedRegion(server.endpoint_url, bytes_per_second=12e6) as region:
            # The last request of the upload does not end before the server has.
            region.fail("stall", method="POST", path="/runs/dying/data-", seconds=600, count=None, skip=1)
            failures: list[BaseException] = []
            options = {**direct, "endpoint_url": region.endpoint_url}
            saving = threading.Thread(target=lambda: failures.append(error_of(save, 2, url, options)))
            with impatient():
                saving.start()
                while saving.is_alive() and region.stats("/runs/dying/data-").bytes_up < NBYTES // 2:
                    time.sleep(0.01)
                server.stop()
                saving.join(300)
            assert not saving.is_alive()
            assert [type(failure) for failure in failures] == [OriginUnavailableError]
    with S3Server(tmp_path) as server:
        assert_holds(1, url, {**server.target_options})
        save(3, url, server.target_options)
        assert_holds(3, url, server.target_options)


@pytest.mark.slow
def test_missing_buckets_and_wrong_secrets_are_named(runs_server, options):
    failure = error_of(save, 1, "s3://nobucket/x", options)
    assert "nobucket" in str(failure)
    failure = error_of(save, 1, "s3://runs/x", {**options, "secret": "wrong"})
    assert isinstance(failure, DeniedError)
    assert "s3://runs/x" in str(failure)
    assert "wrong" not in str(failure)
    for call in (load, lambda url, options: save(1, url, options)):
        assert isinstance(error_of(call, "nope://runs/x", {}), MillraceError)


# --- the answer to the manifest's PUT is lost -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [True, False])
def test_lost_answer_of_own_manifest_is_a_success(region, options, overwrite):
    url = f"s3://runs/lost-{overwrite}"
    region.fail("reset", method="PUT", path=MANIFEST)
    save(1, url, options, overwrite=overwrite)
    assert region.fault_hits() == [1]
    assert_holds(1, url, options)
    assert len(names(url, options)) == 2


@pytest.mark.slow
def test_lost_answer_with_foreign_manifest_fails_the_save(runs_server, region, options, monkeypatch):
    """Another process saves between the check and the PUT; then the answer to this PUT, a refusal, is lost as well."""
    url = "s3://runs/lost-and-late"
    save(1, url, options)
    before = names(url, options)
    monkeypatch.setattr("millrace.checkpoint.writing.writer.refuse_existing", lambda *_: None)
    region.fail("reset", method="PUT", path=MANIFEST)
    assert isinstance(error_of(save, 2, url, options, overwrite=False), ObjectExistsError)
    assert names(url, options) == before, "the loser's data files are gone"
    assert_holds(1, url, options)


@pytest.mark.slow
@pytest.mark.parametrize("arrives", [True, False])
def test_unknown_outcome_is_reported_and_keeps_all_files(region, options, monkeypatch, arrives):
    url = f"s3://runs/unknown-{arrives}"
    save(1, url, options)
    if arrives:
        region.fail("reset", method="PUT", path=MANIFEST, count=None)
    else:
        region.fail("status", method="PUT", path=MANIFEST, count=None)
    # The check for an existing manifest fails, too. The first read finds the files to replace.
    region.fail("status", method="HEAD", path=MANIFEST, skip=1, count=None)
    writer = CheckpointWriter(url, target_options=options)
    with monkeypatch.context() as impatiently:
        impatiently.setattr(retrying, "PATIENCE", Patience(seconds=1, tries=2))
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(2), storage_writer=writer)
    assert isinstance(caught.value.failures[0][0], OutcomeUnknownError)
    assert f"{url}/manifest.millrace" in str(caught.value.failures[0][0])
    writer.abandon(caught.value)
    region.clear_faults()
    assert_holds(2 if arrives else 1, url, options)


# --- loading --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(runs_server):
    save(7, "s3://runs/read", runs_server.target_options)
    return "s3://runs/read"


@pytest.mark.parametrize(
    ("kind", "details"),
    [
        ("status", {"status": 503, "count": 2}),
        ("reset", {"after_bytes": 100_000}),
        ("truncate", {"after_bytes": 100_000}),
        ("stall", {"after_bytes": 1000, "seconds": 0.2}),
    ],
)
def test_load_survives_short_failures(region, options, saved, kind, details):
    region.fail(kind, method="GET", path=DATA, **details)
    assert_holds(7, saved, options)
    assert sum(region.fault_hits()) > 0


def test_load_of_bytes_corrupted_in_transit_raises(region, options, saved):
    for path, after in ((DATA, 1000), (MANIFEST, 10), (MANIFEST, 50)):
        region.fail("corrupt", method="GET", path=path, after_bytes=after)
        assert isinstance(error_of(load, saved, options), CorruptCheckpointError)
        region.clear_faults()
    assert_holds(7, saved, options)


@pytest.mark.slow
def test_stalling_storage_fails_the_load_in_bounded_time(region, options, saved):
    region.fail("stall", method="GET", path=DATA, seconds=600, after_bytes=1000, count=None)
    began = time.monotonic()
    with impatient():
        assert isinstance(error_of(load, saved, options), OriginUnavailableError)
    assert time.monotonic() - began < 300
