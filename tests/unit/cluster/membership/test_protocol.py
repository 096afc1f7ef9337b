"""Members and views from JSON: any input is parsed or refused."""

import json
from typing import Any

import pytest

from millrace.cluster.membership import Member, View
from millrace.errors import DamagedError

GOOD: dict[str, Any] = Member(id="a", address="127.0.0.1:1", weight=2.0).to_json()


def test_member_with_unknown_names_is_accepted() -> None:
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
        {"wire": float("inf")},
        {"wire": [1]},
        {"wire": None},
        {"wire": 0},
        {"id": ""},
        {"address": ""},
        {"state": "gone"},
    ],
)
def test_member_that_is_malformed_raises(change: dict[str, Any]) -> None:
    with pytest.raises(DamagedError):
        Member.from_json(json.loads(json.dumps({**GOOD, **change})))
    with pytest.raises(DamagedError):
        View.from_json({"members": [GOOD, {**GOOD, **change}]})


@pytest.mark.parametrize("value", [[], None, 1, "x", {}, {"members": {}}, {"members": [[]]}], ids=str)
def test_view_that_is_malformed_raises(value: Any) -> None:
    with pytest.raises(DamagedError):
        View.from_json(value)
