"""The class that fsspec has for a protocol."""

from __future__ import annotations

from typing import Any

from fsspec import get_filesystem_class

from millrace.errors import ConfigurationError, MissingDependencyError

# What pip installs them by; of others fsspec's own words are told.
_PACKAGES = {
    "dropbox": "dropboxdrivefs dropbox requests",
    "gdrive": "gdrive-fsspec",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
}


def class_of(scheme: str) -> Any:
    """Raises `ConfigurationError` for a protocol that is not known, `MissingDependencyError` without its library."""
    try:
        return get_filesystem_class(scheme)
    except ImportError as error:
        package = _PACKAGES.get(scheme)
        raise MissingDependencyError(
            f"{scheme}:// needs a library that is not installed",
            next_step=f"pip install {package}" if package else str(error).splitlines()[0],
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"fsspec knows no protocol {scheme!r}", next_step="register it with fsspec.register_implementation"
        ) from error
