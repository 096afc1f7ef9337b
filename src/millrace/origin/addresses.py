"""The options in a URL: the account of an Azure container, the host of an sftp server. Makes no request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from millrace.config import absolute_path
from millrace.errors import UsageError
from millrace.origin.protocol import Origin
from millrace.origin.schemes import is_of_fsspec, open_origin, service_of, split_url
from millrace.runtime.forks import imported


def locate(scheme: str, rest: str) -> tuple[str, dict[str, Any]]:
    """The key in `scheme://rest`, and the options of the storage in it (often none).

    Raises `ConfigurationError` for an unknown scheme, `MissingDependencyError` if its library is not installed.
    """
    service = service_of(scheme)
    if is_of_fsspec(service):
        cls, url = imported("millrace.origin.fsspec_origin.clients").class_of(scheme), f"{scheme}://{rest}"
        return str(cls._strip_protocol(url)).lstrip("/"), dict(cls._get_kwargs_from_urls(url))
    if service.scheme == "az":
        first, slash, inside = rest.lstrip("/").partition("/")
        container, at, host = first.partition("@")
        if at:  # abfs://container@account.dfs.core.windows.net/path, as Spark and adlfs write it
            return f"{container}{slash}{inside}", {"account_name": host.partition(".")[0].lower()}
    return rest, {}


def require_same_place(found: Mapping[str, Any], options: Mapping[str, Any], identity: str) -> None:
    """Raise `UsageError` if the options in a URL (`found`) contradict the storage with `options` and this identity."""
    for name, value in found.items():
        if name == "account_name":
            same = value in _accounts(identity)
        else:
            same = str(options.get(name)) == str(value)
        if not same:
            raise UsageError(
                f"the path is of another storage: its {name} is {value!r}",
                next_step=f"open a file system with target_options={{{name!r}: {value!r}}} for it",
            )


def _accounts(identity: str) -> set[str]:
    """Possible accounts in the endpoint of an Azure origin: the first part of the host, or the path (emulator)."""
    endpoint = urlsplit(identity.partition("+")[2])
    return {(endpoint.hostname or "").partition(".")[0], endpoint.path.strip("/")} - {""}


def options_for(url: str, endpoint: str | None = None) -> dict[str, Any] | None:
    """The options of a command for a URL: those in the URL, and the address of another service than the usual one.

    None if there are none. Local files ignore the endpoint. Raises `UsageError` if the scheme has no endpoint.
    """
    scheme, rest = split_url(url)
    service = service_of(scheme)
    if service.rooted:
        return None
    found = locate(scheme, rest)[1]
    if endpoint:
        if not service.endpoint_option:
            raise UsageError(f"{scheme}:// has no endpoint", next_step="remove the endpoint: the URL has the address")
        found[service.endpoint_option] = endpoint
    return found or None


def origin_for_url(
    url: str, target_options: Mapping[str, Any] | None = None, limits: Mapping[str, Any] | None = None
) -> tuple[Origin, str]:
    """Open the origin of `url`; returns it with the key (`bucket/path`) that `url` names there. `limits` as `open_origin`.

    `target_options` and the options in the URL are combined. Raises `UsageError` if they contradict each other, and the
    errors of `open_origin`.
    """
    scheme, rest = split_url(url)
    if "://" not in url:
        return open_origin(scheme, target_options, limits), absolute_path(rest)
    key, found = locate(scheme, rest)
    options = dict(target_options or {})
    if "connection_string" not in options:  # it names the account
        options = {**found, **options}
    origin = open_origin(scheme, options or None, limits)
    require_same_place(found, options, origin.identity)
    return origin, key
