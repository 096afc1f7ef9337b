"""Which saves are copied to other nodes while the copies of earlier ones are not complete."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import wait_until

from millrace.checkpoint.format.manifest import Manifest
from millrace.checkpoint.run import replicator as replicator_module
from millrace.checkpoint.run.parts import PartRecord
from millrace.checkpoint.run.replicator import Replicator
from millrace.checkpoint.run.run_layout import checkpoint_name, open_run
from millrace.checkpoint.run.save_values import Member, Written
from millrace.checkpoint.run.tiers import Tiers
from millrace.checkpoint.run.uploading import Uploader


class SlowPeers:
    """Other nodes, whose copies wait for `go_on`."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.copied: list[str] = []

    def look(self) -> list[Any]:
        return []

    def copy(self, source: Any, name: str, files: Any, **_: Any) -> list[str]:
        assert self.go_on.wait(300)
        self.copied.append(name)
        return ["another node"]

    def close(self) -> None:
        pass


@pytest.fixture
def peers() -> SlowPeers:
    return SlowPeers()


def uploader_of(peers: SlowPeers, member: Member, directory: Path) -> Uploader:
    local, origin = open_run(directory / "near"), open_run(directory / "origin")

    def nothing(*_: Any) -> None:
        pass

    replicator = Replicator(peers, local=local, origin=origin, check_claim=nothing)  # type: ignore[arg-type]
    return Uploader(
        tiers=Tiers(origin=origin, local=local), local=local, member=member, local_keep=1, check=nothing,
        join=nothing, after=nothing, give_up=nothing, replicator=replicator,  # type: ignore[arg-type]
    )  # fmt: skip


WRITTEN = Written(name="", save_id="", own_files=("data-1",), is_near=True, is_copied=True, result=None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("member", "copied"), [(Member(0, 1), [1, 2]), (Member(1, 2), [1, 2, 3])], ids=["single", "second"]
)
def test_rank_copies_what_the_first_rank_has_ordered_although_earlier_copies_wait(
    peers: SlowPeers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: Member, copied: list[int]
) -> None:
    """A single rank leaves out a save while another one waits. The first of several waits for the parts of all."""
    record = PartRecord(member.rank, member.count, (0, 0, 0), ())
    monkeypatch.setattr(replicator_module.PartRecord, "of", lambda _: record)
    monkeypatch.setattr(Replicator, "_whole", lambda *_: None)
    monkeypatch.setattr(Replicator, "_complete", lambda *_: None)
    uploader = uploader_of(peers, member, tmp_path)
    assert uploader.replicator is not None
    for step in (1, 2, 3):
        uploader._replicate(replace(WRITTEN, name=checkpoint_name(step)), _Stored())  # type: ignore[arg-type]
    peers.go_on.set()
    wait_until(lambda: len(peers.copied) == len(copied))
    uploader.close()
    assert peers.copied == [checkpoint_name(step) for step in copied]


class _Stored:
    manifest: Manifest | None = None
