"""The table of events, and its log lines."""

from __future__ import annotations

import ast
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tools.reference import PAGES, REFERENCE

from millrace.event_log import EVENTS, REPEAT_SECONDS, EventLog
from millrace.events import Event, emit
from millrace.runtime.locks import in_fetch

SOURCE = Path(__file__).parents[2] / "src" / "millrace"
# Names that the code composes.
COMPOSED = {
    *(f"cluster.member.{what}" for what in ("awaited", "here", "leaving", "lost", "no_response")),
    "cache.store.rebuilding",
    "cache.store.rebuilt",
    "origin.limits.default",
    "origin.limits.private",
    "run.base.damaged",
    "run.base.gone",
}


def _emitted() -> Iterator[ast.Call]:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Event":
                yield node


def test_every_event_in_the_source_is_declared() -> None:
    values = [each.value for call in _emitted() for each in call.keywords if each.arg == "name"]
    assert {*(value.value for value in values if isinstance(value, ast.Constant)), *COMPOSED} == set(EVENTS)


def test_events_in_the_source_contain_no_python_representations() -> None:
    calls = [ast.unparse(call) for call in _emitted()]
    assert [call for call in calls if "repr(" in call or "!r}" in call or "__name__" in call] == []


@pytest.mark.parametrize("name", PAGES)
def test_generated_page_equals_the_declarations(name: str) -> None:
    assert (REFERENCE / name).read_text() == PAGES[name](), "run: python tools/reference.py"


@pytest.mark.parametrize(
    ("name", "logger", "level"),
    [
        ("peer.breaker.opened", "millrace.cluster", logging.WARNING),
        ("peer.breaker.closed", "millrace.cluster", logging.INFO),
        ("cluster.member.lost", "millrace.cluster", logging.WARNING),
        ("run.prune.failed", "millrace.checkpoint", logging.WARNING),
        ("cache.block.corrupt", "millrace.cache", logging.WARNING),
        ("cache.evicted", "millrace.cache", logging.DEBUG),
        ("origin.gate.closed", "millrace.origin", logging.WARNING),
    ],
)
def test_event_is_logged_by_its_package_at_its_level(
    name: str, logger: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "millrace")
    emit(Event(name=name, subject=f"subject of {name}", detail="the detail"))
    (record,) = caplog.records
    assert (record.name, record.levelno) == (logger, level)
    assert record.getMessage() == f"subject of {name}: {EVENTS[name].text}: the detail"


def test_event_with_a_line_of_its_own_is_not_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "millrace")
    emit(Event(name="cache.full", subject="a disk"))
    assert caplog.records == []


def test_repeated_event_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "millrace")
    now = [100.0]
    log = EventLog(lambda: now[0])
    for subject in ("one", "one", "another"):
        log(Event(name="peer.corrupt", subject=subject))
    now[0] += REPEAT_SECONDS
    log(Event(name="peer.corrupt", subject="one"))
    assert [record.levelno for record in caplog.records] == [
        logging.WARNING,
        logging.DEBUG,
        logging.WARNING,
        logging.WARNING,
    ]


def test_event_inside_a_fetch_is_logged_with_its_id(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millrace")
    event = Event(name="origin.request.failed", subject="s3://bucket/key of a fetch", detail="timeout")
    in_fetch("ab-1", lambda: emit(event))
    assert caplog.messages == ["s3://bucket/key of a fetch: a request failed: timeout (fetch ab-1)"]


def test_control_characters_of_a_subject_are_escaped(caplog: pytest.LogCaptureFixture) -> None:
    emit(Event(name="peer.corrupt", subject="a\x1b[2Jb"))
    assert "\x1b" not in caplog.text
    assert "a\\x1b[2Jb" in caplog.text


def test_query_of_a_web_address_in_an_event_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    emit(Event(name="peer.corrupt", subject="https://h/x?X-Amz-Signature=SECRET", detail="http://h/y?sig=SECRET: lost"))
    assert "SECRET" not in caplog.text
    assert caplog.messages[0].startswith("https://h/x?...: a peer sent")


def test_import_configures_no_handler_and_no_level() -> None:
    code = (
        "import logging, millrace.checkpoint\n"
        "loggers = [logging.getLogger(), *map(logging.getLogger, logging.root.manager.loggerDict)]\n"
        "print([each.name for each in loggers if each.name.startswith('millrace') and (each.handlers or each.level)],"
        " logging.getLogger().handlers)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] []\n"
