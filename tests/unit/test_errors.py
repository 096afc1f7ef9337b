import inspect
import pickle

import pytest

from millrace import errors
from millrace.errors import MillraceError, ObjectExistsError, ObjectNotFoundError

ALL = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, MillraceError)]


@pytest.mark.parametrize("cls", ALL)
def test_each_error_is_picklable_and_one_line(cls: type[MillraceError]) -> None:
    error = cls("s3://b/k\nis broken", next_step="mend it")
    error.extra = 7  # type: ignore[attr-defined]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "s3://b/k is broken: mend it"
    assert copy.extra == 7
    assert getattr(copy, "errno", None) == getattr(error, "errno", None)


def test_error_codes_are_unique() -> None:
    codes = [cls.code for cls in ALL]
    assert len(codes) == len(set(codes))


def test_errors_have_the_base_classes_of_fsspec_and_pyarrow() -> None:
    assert issubclass(ObjectNotFoundError, FileNotFoundError)
    assert issubclass(errors.DeniedError, PermissionError)
    assert issubclass(ObjectExistsError, FileExistsError)
    assert ObjectNotFoundError("x").errno == 2


def test_error_of_a_node_is_picklable() -> None:
    error = errors.PeerRefusedError("a node refused the request", status=424)
    error.reason, error.has_lease = "denied", True
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.status, copy.reason, copy.has_lease) == (424, "denied", True)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://h/n?sig=SEKRET does not exist", "https://h/n?... does not exist"),
        ("'HTTP://h/n?a=1&sig=SEKRET' is a pattern", "'HTTP://h/n?...' is a pattern"),
        ("(http://h?sig=SEKRET): x", "(http://h?...): x"),
        ("https://h/n?...SEKRET is missing", "https://h/n?... is missing"),
        ("https://h/n?...: what of it?", "https://h/n?...: what of it?"),
        ("s3://bucket/n?m is a name", "s3://bucket/n?m is a name"),
    ],
)
def test_error_hides_the_query_of_a_web_address(text: str, shown: str) -> None:
    error = ObjectNotFoundError(text, next_step=text)
    assert error.message == error.next_step == error.args[0] == shown
