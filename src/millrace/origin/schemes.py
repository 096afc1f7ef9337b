"""Which origin serves which scheme: a table, and behind it what else fsspec knows. Imports nothing before it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.errors import ConfigurationError, UsageError
from millrace.origin.importing import imported
from millrace.origin.limits import Limits, limited
from millrace.origin.options.store import checked_mapping
from millrace.origin.protocol import Origin
from millrace.origin.userinfo import refuse_password

_OBJECT_STORE = "millrace.origin.object_store:ObjectStoreOrigin"
_WEB = "millrace.origin.web:WebOrigin"
_HUB = "millrace.origin.hub:HubOrigin"
_FSSPEC = "millrace.origin.fsspec_origin:FsspecOrigin"


@dataclass(frozen=True, slots=True)
class Service:
    """What serves a scheme: `aliases` are all names that users write for it, `scheme` among them.

    `implementation` is `module:class`, made with (scheme, target_options). With `rooted`, keys are absolute paths of this
    machine rather than bucket/key.
    """

    scheme: str
    aliases: tuple[str, ...]
    implementation: str
    rooted: bool = False


_TABLE = (
    Service("s3", ("s3", "s3a"), _OBJECT_STORE),
    Service("az", ("az", "abfs", "abfss"), _OBJECT_STORE),
    Service("gs", ("gs", "gcs"), _OBJECT_STORE),
    Service("hf", ("hf",), _HUB),
    Service("http", ("http",), _WEB),
    Service("https", ("https",), _WEB),
    Service("file", ("file", "local"), _OBJECT_STORE, rooted=True),
)
_BY_ALIAS: Mapping[str, Service] = {alias: service for service in _TABLE for alias in service.aliases}

SCHEMES: Mapping[str, str] = {alias: service.scheme for alias, service in _BY_ALIAS.items()}
"""Every scheme of the table that users write, and the one that it stands for. fsspec's own are not among them."""

# fsspec's names for caches of its own and for this file system: a cache over a cache gives nothing but stale bytes.
_CACHES = frozenset({"blockcache", "cached", "filecache", "millrace", "simplecache"})


def service_of(scheme: str) -> Service:
    """What serves `scheme`. Raises `ConfigurationError` where nothing does."""
    found = _BY_ALIAS.get(scheme) or _of_fsspec(scheme)
    if found is None and scheme.lower() in _BY_ALIAS:
        raise ConfigurationError(f"no origin serves {scheme!r}", next_step=f"write {scheme.lower()}, in lower case")
    if found is None:
        raise ConfigurationError(
            f"no origin serves {scheme!r}",
            next_step=f"use one of {', '.join(service.scheme for service in _TABLE)}, or a protocol that fsspec knows",
        )
    return found


def is_of_fsspec(service: Service) -> bool:
    """Whether a service is a library that fsspec has, rather than one of the table."""
    return service.implementation == _FSSPEC


def _of_fsspec(scheme: str) -> Service | None:
    """The service over the library that fsspec has for `scheme`; names of the same class are aliases of each other."""
    if scheme in _CACHES:
        return None
    known: Any = imported("fsspec.registry")
    classes = {name: str(entry["class"]) for name, entry in known.known_implementations.items()}
    classes |= {name: f"{each.__module__}.{each.__qualname__}" for name, each in known.registry.items()}
    wanted = classes.get(scheme)
    if wanted is None:
        return None
    aliases = tuple(name for name, each in classes.items() if each == wanted and name not in _BY_ALIAS)
    return Service(aliases[0], aliases, _FSSPEC)


def open_origin(
    scheme: str, target_options: Mapping[str, Any] | None = None, limits: Mapping[str, Any] | None = None
) -> Origin:
    """Open the storage that serves `scheme`, within the limits of this node. No request is made.

    `limits` are the explicit ones of the options `config.LIMIT_NAMES`; the others come from the environment and the file.
    Raises `ConfigurationError` for a scheme or an option that is not known, `MissingDependencyError` for a scheme whose
    library is not installed.
    """
    service = service_of(scheme)
    checked_mapping(target_options, "'target_options'")
    module, _, name = service.implementation.partition(":")
    origin: Origin = getattr(imported(module), name)(service.scheme, target_options)
    return limited(origin, Limits.of(service.scheme, limits))


def split_url(url: str) -> tuple[str, str]:
    """Split `scheme://bucket/key` into scheme and key; a plain path has the scheme `file`. Raises `UsageError`."""
    if not url:
        raise UsageError("a URL is empty", next_step="write s3://bucket/key, or '.' for the current directory")
    scheme, separator, key = url.partition("://")
    if separator and scheme.startswith("millrace::"):
        raise UsageError("only fsspec chains URLs with 'millrace::'", next_step="leave 'millrace::' out")
    if separator:
        refuse_password(scheme, key)
    broken, slash, _ = url.partition(":/")
    if slash and not separator and broken in _BY_ALIAS and not _BY_ALIAS[broken].rooted:
        # As a local path it would be a directory beside the program.
        raise UsageError(f"{broken}:/ has one slash after its colon", next_step=f"did you mean {broken}://")
    return (scheme, key) if separator else ("file", url)
