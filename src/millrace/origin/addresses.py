"""What a URL says besides the key: the account of an Azure container, the host of an sftp server. Makes no request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from millrace.errors import UsageError
from millrace.origin.importing import imported
from millrace.origin.protocol import Origin
from millrace.origin.schemes import is_of_fsspec, open_origin, service_of, split_url

_ENDPOINT_OPTIONS = {"s3": "endpoint_url", "gs": "endpoint_url", "az": "account_host", "hf": "endpoint"}


def locate(scheme: str, rest: str) -> tuple[str, dict[str, Any]]:
    """The key that `scheme://rest` names, and the options of the storage that it names with it (often none).

    Raises `ConfigurationError` for a scheme that nothing serves, `MissingDependencyError` for one without its library.
    """
    service = service_of(scheme)
    if is_of_fsspec(service):
        cls, url = imported("millrace.origin.fsspec_origin.library").class_of(scheme), f"{scheme}://{rest}"
        return str(cls._strip_protocol(url)).lstrip("/"), dict(cls._get_kwargs_from_urls(url))
    if service.scheme == "az":
        first, slash, inside = rest.lstrip("/").partition("/")
        container, at, host = first.partition("@")
        if at:  # abfs://container@account.dfs.core.windows.net/path, as Spark and adlfs write it
            return f"{container}{slash}{inside}", {"account_name": host.partition(".")[0].lower()}
    return rest, {}


def require_same_place(told: Mapping[str, Any], options: Mapping[str, Any], identity: str) -> None:
    """Raise `UsageError` where a URL names (`told`) another storage than that of `options`, which has this identity."""
    for name, value in told.items():
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
    """What may be the account in the endpoint of an Azure origin: the host's first part, or behind the emulator's host."""
    endpoint = urlsplit(identity.partition("+")[2])
    return {(endpoint.hostname or "").partition(".")[0], endpoint.path.strip("/")} - {""}


def options_for(url: str, endpoint: str | None = None) -> dict[str, Any] | None:
    """The options that a command gives for a URL: what it says itself, and the address of a service other than the usual.

    None where there are none. An endpoint means nothing to local files. Raises `UsageError` for one to a scheme without.
    """
    scheme, rest = split_url(url)
    service = service_of(scheme)
    if service.rooted:
        return None
    told = locate(scheme, rest)[1]
    if endpoint:
        option = _ENDPOINT_OPTIONS.get(service.scheme)
        if option is None:
            raise UsageError(
                f"{scheme}:// has no endpoint", next_step="leave the endpoint out: the URL says where it is"
            )
        told[option] = endpoint
    return told or None


def origin_for_url(url: str, target_options: Mapping[str, Any] | None = None) -> tuple[Origin, str]:
    """Open the origin of `url`; returns it with the key (`bucket/path`) that `url` names there.

    What the URL itself says of the storage counts where `target_options` do not say it. Raises `UsageError` where they
    contradict each other, and what `open_origin` raises.
    """
    scheme, rest = split_url(url)
    if "://" not in url:
        return open_origin(scheme, target_options), rest
    key, told = locate(scheme, rest)
    options = dict(target_options or {})
    if "connection_string" not in options:  # it names the account
        options = {**told, **options}
    origin = open_origin(scheme, options or None)
    require_same_place(told, options, origin.identity)
    return origin, key
