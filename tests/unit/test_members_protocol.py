"""Members and views as they come from elsewhere: whatever stands there, it is read, or told that it is no such thing."""

import json
from typing import Any

import pytest

from millrace.errors import DamagedError
from millrace.members import Member, View

GOOD: dict[str, Any] = Member(id="a", address="127.0.0.1:1", weight=2.0).to_json()


def test_names_of_a_newer_version_are_ignored() -> None:
    assert Member.from_json({**GOOD, "later": 1}) == Member(id="a", address="127.0.0.1:1", weight=2.0)


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 0},
        {"weight": -1},
        {"weight": float("nan")},
        {"weight": float("inf")},
        {"weight": 10**400},
        {"weight": "much"},
        {"wire": [1, float("inf")]},
        {"wire": [1]},
        {"wire": None},
        {"wire": [2, 1]},
        {"id": ""},
        {"address": ""},
        {"state": "gone"},
    ],
)
def test_what_is_no_member_is_told(change: dict[str, Any]) -> None:
    with pytest.raises(DamagedError):
        Member.from_json(json.loads(json.dumps({**GOOD, **change})))
    with pytest.raises(DamagedError):
        View.from_json({"members": [GOOD, {**GOOD, **change}]})


@pytest.mark.parametrize("value", [[], None, 1, "x", {}, {"members": {}}, {"members": [[]]}], ids=str)
def test_what_is_no_view_is_told(value: Any) -> None:
    with pytest.raises(DamagedError):
        View.from_json(value)
