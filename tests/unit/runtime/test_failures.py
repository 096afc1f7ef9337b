import errno
import gc
import weakref
from collections.abc import Callable

import pytest

from millrace.errors import DiskFullError, StorageError
from millrace.runtime.failures import FailingDiskError, LostDataError, disk_errors, raise_disk_error

Translate = Callable[[Callable[[], None]], None]


def with_a_context_manager(action: Callable[[], None]) -> None:
    with disk_errors("a/file"):
        action()


def with_try(action: Callable[[], None]) -> None:
    try:
        action()
    except (OSError, OverflowError) as error:
        raise_disk_error(error, "a/file")


both = pytest.mark.parametrize("translate", [with_a_context_manager, with_try])


@both
@pytest.mark.parametrize(
    ("error", "expected", "text"),
    [
        (OSError(errno.ENOSPC, "full"), DiskFullError, "a/file: no space left on the disk"),
        (OSError(errno.EDQUOT, "full"), DiskFullError, "a/file: no space left on the disk"),
        (OSError(errno.EFBIG, "large"), DiskFullError, "a/file: larger than a file on this disk can be"),
        (OverflowError("large"), DiskFullError, "a/file: larger than a file on this disk can be"),
        (OSError(errno.EMFILE, "files"), StorageError, "a/file: files: raise the limit with 'ulimit -n'"),
        (OSError(errno.EIO, "broken"), FailingDiskError, "a/file: broken: check the disk"),
        (OSError(errno.EACCES, "denied"), StorageError, "a/file: denied: check the disk and its permissions"),
    ],
)
def test_error_of_a_file_is_translated_with_its_cause(
    translate: Translate, error: Exception, expected: type[StorageError], text: str
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(StorageError, match=text) as caught:
        translate(fail)
    assert type(caught.value) is expected
    assert caught.value.__cause__ is error


@both
def test_error_of_millrace_is_raised_unchanged_without_a_reference_cycle(translate: Translate) -> None:
    def fail() -> None:
        raise LostDataError("b/file: is gone", next_step="open the object again")

    gc.disable()  # only the counts of references free the error
    try:
        try:
            translate(fail)
        except LostDataError as error:
            seen = weakref.ref(error), str(error), error.__cause__
        reference, text, cause = seen
        assert reference() is None
        assert text == "b/file: is gone: open the object again"
        assert cause is None
    finally:
        gc.enable()
