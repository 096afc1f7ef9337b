"""URLs with a password in them, which would end up in logs, in the cache's index and in error messages. Pure."""

from __future__ import annotations

import re

from millrace.errors import UsageError

# No bucket of these has a colon in its name. So a password with a slash in it, as AWS's keys may have, is seen, too.
_WITHOUT_COLONS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "hf"})
_FIRST_PART = re.compile(r"[^/?#]*")


def refuse_password(scheme: str, key: str) -> None:
    """Raise `UsageError`, which does not repeat it, where `key` (what follows `scheme://`) begins with `user:password@`.

    What lies before an `@` alone is a name that some origins have: a container of Azure, a repository's revision. Names of
    local files are never looked at.
    """
    if scheme in ("file", "local"):
        return
    first = _FIRST_PART.match(key.lstrip("/"))
    name, at, _ = (first[0] if first else "").partition("@")
    if ":" in name and (at or (scheme in _WITHOUT_COLONS and not name.startswith("arn:"))):
        if "@" not in key:  # a port, perhaps; shown is neither
            raise UsageError(
                f"the first part of a path of {scheme}:// has a ':' in it",
                next_step="write the name alone; the address of the service is an option of its own",
            )
        raise UsageError(
            f"a path of {scheme}:// begins with what looks like a user name and a password",
            next_step="give credentials as target_options, or leave them to the environment",
        )
