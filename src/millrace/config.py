"""Options of the file system and of a node: from arguments, `MILLRACE_*` variables, `millrace.toml`, and defaults.

The order is argument, environment, file, default. Parsing is pure; only `load_file` touches the disk. Arguments travel in
a file system's pickle; environment and file are read again by the receiver, since paths and disks differ per node.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.errors import ConfigurationError, printable

_log = logging.getLogger("millrace")

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SECONDS = {"": 1.0, "MS": 1e-3, "S": 1.0, "M": 60.0, "MIN": 60.0, "H": 3600.0, "D": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z%]*)\s*")

DEFAULT_CAPACITY = "80%"
DEFAULT_MIN_FREE = "10%"
DEFAULT_CONSISTENCY = "60s"

DEFAULT_ETCD_PORT = 2379
DEFAULT_CLUSTER = "default"

LOCAL_FOLDER = "local"
"""The folder, inside a cache directory, of a node alone and of the first node of a cluster on a machine."""

_CLUSTER_NAME = re.compile(r"[A-Za-z0-9._-]+")

_TLS_FILES = ("cert", "key", "ca")

# The keyword arguments of the face that are options of the cache, in the order of the documentation.
OPTION_NAMES = (
    "cache_dir",
    "capacity",
    "min_free",
    "members",
    "consistency",
    "native",
    "etcd_host",
    "etcd_port",
    "cluster_token",
    "tls",
    "replicas",
    "max_requests",
    "request_rate",
)

_OTHER_VARIABLES = frozenset({"MILLRACE_CONFIG", "MILLRACE_DEBUG"})
# What Kubernetes sets in every pod beside a service of that name.
_OF_A_SERVICE = re.compile(r"MILLRACE_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)")
_told_variables: set[str] = set()

LIMIT_NAMES = ("cache_dir", "max_requests", "request_rate")
"""The options that say how much a node may ask of an origin, and where its processes agree about it."""

MOST_REQUESTS = 1024
"""The largest `max_requests`."""


@dataclass(frozen=True)
class Amount:
    """So many bytes, or such a share of the disk's size. Exactly one of the two is set."""

    nbytes: int | None = None
    share: float | None = None

    def of(self, disk_bytes: int) -> int:
        """The amount in bytes on a disk of `disk_bytes`."""
        return self.nbytes if self.nbytes is not None else int((self.share or 0.0) * disk_bytes)


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The files (PEM) of a node of a cluster with TLS: its certificate, the key to it, and who signs all members'."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Everything that a node's cache is built from. Hashable: equal options share one cache in a process.

    `max_age_seconds` is how long metadata is believed: `inf` for ever (`"immutable"`), 0 never (`"always"`).
    `native=False` reads by `pread` with a checksum every time instead of through memory maps.
    `members` says how the cluster is found: `"auto"`, `"none"`, `"ray"`, `"etcd://..."` or `"static://..."`. `replicas` is
    how many nodes keep each block. `folder` is not for users: which node's folder inside the cache directories is meant.
    """

    cache_dirs: tuple[Path, ...]
    capacity: Amount
    min_free: Amount
    max_age_seconds: float
    native: bool
    members: str
    cluster_token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    replicas: int = 1
    folder: str = LOCAL_FOLDER


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """How much this node may ask of one origin. None: nothing was said.

    `max_requests` is the most requests in flight at once; `requests_per_second` the most that begin. `directory` is where
    the processes of the node agree about them; None where this user has no place for a cache.
    """

    max_requests: int | None
    requests_per_second: float | None
    directory: Path | None


def parse_amount(value: str | int, *, option: str) -> Amount:
    """Parse `"200GB"`, `"64MiB"`, `123` or `"80%"`. Raises `ConfigurationError` naming `option`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Amount(nbytes=value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match:
        number, unit = float(match[1]), match[2].upper()
        if unit == "%" and number <= 100:
            return Amount(share=number / 100)
        if unit in _UNITS and math.isfinite(number * _UNITS[unit]):
            return Amount(nbytes=int(number * _UNITS[unit]))
    raise ConfigurationError(
        f"{option}={value!r} is no size", next_step="write bytes, a size such as '200GB', or a share such as '80%'"
    )


def parse_consistency(value: str | float) -> float:
    """Parse `"immutable"`, `"always"` or a time such as `"60s"` into the seconds that metadata is believed."""
    if value == "immutable":
        return math.inf
    if value == "always":
        return 0.0
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match and match[2].upper() in _SECONDS:
        return float(match[1]) * _SECONDS[match[2].upper()]
    raise ConfigurationError(
        f"consistency={value!r} is not known", next_step="write 'immutable', 'always' or a time such as '60s'"
    )


def parse_seconds(value: str | float, *, option: str) -> float:
    """Parse a time such as `"1d"`, `"12h"`, `"90s"` or `90` into seconds. Raises `ConfigurationError` naming `option`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match and match[2].upper() in _SECONDS and float(match[1]):
        return float(match[1]) * _SECONDS[match[2].upper()]
    raise ConfigurationError(f"{option}={value!r} is no time", next_step="write a time such as '90s', '12h' or '7d'")


def _parse_members(settings: Mapping[str, Any]) -> str:
    members = settings.get("members")
    if settings.get("etcd_host"):
        if members not in (None, "auto"):
            raise ConfigurationError("etcd_host and members exclude each other", next_step="give one of them")
        members = f"etcd://{settings['etcd_host']}:{settings.get('etcd_port') or DEFAULT_ETCD_PORT}"
    members = str(members or "auto")
    if members in ("auto", "none", "ray"):
        return members
    if "@" in members:
        raise ConfigurationError(  # without its value, which may hold a password
            "members has a user or a password in it, which cannot be used", next_step="write host:port only"
        )
    scheme, separator, addresses = members.partition("://")
    if separator and scheme == "etcd":
        parse_etcd(members)
        return members
    if separator and scheme == "static":
        parse_addresses(addresses, option=f"members={members!r}")
        return members
    raise ConfigurationError(
        f"members={members!r} is not known",
        next_step="use 'auto', 'none', 'ray', 'etcd://host:port' or 'static://host:port,host:port'",
    )


def parse_etcd(members: str) -> tuple[tuple[tuple[str, int], ...], str]:
    """Parse `"etcd://host:port,host:port/name"`: where etcd is, and the cluster's name, `default` where none is given.

    Raises `ConfigurationError`.
    """
    scheme, _, text = members.partition("://")
    addresses, slash, name = text.partition("/")
    if scheme != "etcd" or (slash and not _CLUSTER_NAME.fullmatch(name)):
        raise ConfigurationError(
            f"members={members!r} names no cluster in etcd",
            next_step="write etcd://host:port, or etcd://host:port/name with letters, digits and . _ - in the name",
        )
    return parse_addresses(addresses, option=f"members={members!r}"), name or DEFAULT_CLUSTER


def parse_addresses(text: str, *, option: str) -> tuple[tuple[str, int], ...]:
    """Parse `"host:port,host:port"`, IPv6 hosts in brackets. Raises `ConfigurationError` naming `option`."""
    found = []
    for part in text.split(","):
        host, separator, port = part.strip().rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not separator or not bare or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigurationError(
                f"{option}: {part.strip()!r} is no address", next_step="write host:port, several with commas between"
            )
        found.append((bare, int(port)))
    return tuple(found)


def address_text(host: str, port: int) -> str:
    """The reverse of `parse_addresses` for one: `host:port`, IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_token(value: Any) -> str | None:
    if value in (None, ""):
        return None
    text = str(value)
    if not text.isascii() or not text.isprintable() or " " in text or len(text) < 8:
        raise ConfigurationError(  # without its value, which is a secret
            "cluster_token cannot be used", next_step="write at least 8 printable ASCII characters without spaces"
        )
    return text


def _parse_tls(value: Any) -> Tls | None:
    """A mapping of `cert`, `key` and `ca` to files, or a folder that holds `cert.pem`, `key.pem` and `ca.pem`."""
    if value in (None, "", False):
        return None
    if isinstance(value, Mapping) and sorted(value) == sorted(_TLS_FILES):
        files = {name: Path(os.path.abspath(os.path.expanduser(str(value[name])))) for name in _TLS_FILES}
    elif isinstance(value, str | os.PathLike):
        folder = Path(os.path.abspath(os.path.expanduser(os.fspath(value))))
        files = {name: folder / f"{name}.pem" for name in _TLS_FILES}
    else:
        raise ConfigurationError(
            "tls is neither a folder nor a mapping of 'cert', 'key' and 'ca'",
            next_step="name a folder with cert.pem, key.pem and ca.pem",
        )
    return Tls(**files)


def _parse_replicas(value: Any) -> int:
    text = str(value).strip()
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 16 and not isinstance(value, bool):
        return int(text)
    raise ConfigurationError(f"replicas={value!r} cannot be used", next_step="write a number from 1 to 16")


def _parse_max_requests(value: Any) -> int | None:
    if value is None:
        return None
    text = str(value).strip()
    if text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_REQUESTS and not isinstance(value, bool):
        return int(text)
    raise ConfigurationError(
        f"max_requests={value!r} cannot be used", next_step=f"write a number from 1 to {MOST_REQUESTS}"
    )


def parse_rate(value: Any) -> float | None:
    """Parse `200`, `"200/s"` or `"5000/5min"` into requests a second; None and `"none"` are no limit.

    Raises `ConfigurationError`.
    """
    if value is None or value == "none":
        return None
    count, slash, period = str(value).strip().partition("/")
    try:
        period = period.strip()
        if isinstance(value, bool) or (slash and not period):
            raise ValueError
        seconds = parse_seconds(period if period[:1].isdigit() else f"1{period}", option="") if slash else 1.0
        rate = float(count) / seconds
        if not 1e-4 <= rate <= 1e6:
            raise ValueError
    except ValueError as error:  # also that of parse_seconds
        raise ConfigurationError(
            f"request_rate={value!r} is no rate", next_step="write requests a second, or a rate such as '5000/5min'"
        ) from error
    return rate


def _parse_cache_dirs(value: Any, environ: Mapping[str, str]) -> tuple[Path, ...]:
    if value is None:
        base = environ.get("XDG_CACHE_HOME")
        value = os.path.join(base, "millrace") if base else os.path.join(_home(environ), ".cache", "millrace")
    parts: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    paths = [_parse_directory(part) for part in parts if part != ""]
    if not paths:
        raise ConfigurationError("cache_dir is empty", next_step="name a directory, or leave it out")
    # One disk named twice, also by a symbolic link, is one disk: its index must be opened once in a process.
    return tuple(dict.fromkeys(paths))


def _parse_directory(part: Any) -> Path:
    if isinstance(part, str | os.PathLike):
        try:
            path = os.path.expanduser(os.fspath(part))
            if isinstance(path, str) and not path.startswith("~"):
                path.encode()
                return Path(os.path.realpath(path))
        except ValueError:
            pass  # a null character, which no path may have, or no UTF-8, which LMDB takes: told below
    raise ConfigurationError(f"cache_dir={part!r} is no directory", next_step="write a path, or a list of paths")


def _home(environ: Mapping[str, str]) -> str:
    home = environ.get("HOME") or os.path.expanduser("~")
    if home == "~":
        raise ConfigurationError("this user has no home directory to keep the cache in", next_step="set 'cache_dir'")
    return home


def _parse_bool(value: Any, *, option: str) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off"):
        return False
    raise ConfigurationError(f"{option}={value!r} is neither true nor false", next_step="write true or false")


def load_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the configuration file: `$MILLRACE_CONFIG`, else `millrace.toml` here, else the user's; `{}` where none is.

    Raises `ConfigurationError` when the file named does not exist, is no TOML, or has an unknown key.
    """
    named = environ.get("MILLRACE_CONFIG")
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    candidates = [named] if named else ["millrace.toml", os.path.join(home, "millrace", "millrace.toml")]
    for path in candidates:
        try:
            text = Path(path).read_bytes()
        except FileNotFoundError:
            if named:
                raise ConfigurationError(
                    f"MILLRACE_CONFIG={named} does not exist", next_step="correct or unset it"
                ) from None
            continue
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}", next_step="correct the file") from error
        return _parse_file(path, text)
    return {}


def _parse_file(path: str, text: bytes) -> dict[str, Any]:
    import tomllib  # every new worker would spend 2 ms on it, and hardly any node has such a file

    try:
        settings = tomllib.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8, as TOML must be", next_step="save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: {error}", next_step="correct the file") from error
    _check_names(settings, source=f"{path}: ")
    return settings


def _check_names(names: Iterable[str], *, source: str = "") -> None:
    """Raise `ConfigurationError` for a name that is no option. `source` comes first in the message."""
    unknown = sorted(set(names) - set(OPTION_NAMES))
    if unknown:
        raise ConfigurationError(
            f"{source}unknown option {', '.join(map(repr, unknown))}",
            next_step=f"known ones are {', '.join(OPTION_NAMES)}",
        )


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    """Say once a process which `MILLRACE_*` variables mean nothing: no error, since they may be somebody else's."""
    known = {f"MILLRACE_{name.upper()}" for name in OPTION_NAMES} | _OTHER_VARIABLES
    for name in sorted(name for name in environ if name.startswith("MILLRACE_") and name not in known):
        if name in _told_variables or _OF_A_SERVICE.fullmatch(name):
            continue
        _told_variables.add(name)
        from difflib import get_close_matches  # hardly anyone needs it

        near = get_close_matches(name, sorted(known), 1, 0.0)[0]
        _log.warning("the environment variable %s means nothing to Millrace: is %s meant?", printable(name), near)


def resolve(
    arguments: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, file: Mapping[str, Any] | None = None
) -> CacheOptions:
    """Combine `arguments` (None means not given), environment, file and defaults into `CacheOptions`.

    Raises `ConfigurationError` for a value that cannot be used. `environ` and `file` default to the real ones.
    """
    environ = os.environ if environ is None else environ
    settings = _settings(arguments, environ, load_file(environ) if file is None else file)
    _parse_limits(settings)  # used by whoever opens the origin; a mistake in them shows here, too
    return CacheOptions(
        cache_dirs=_parse_cache_dirs(settings.get("cache_dir"), environ),
        capacity=parse_amount(settings.get("capacity", DEFAULT_CAPACITY), option="capacity"),
        min_free=parse_amount(settings.get("min_free", DEFAULT_MIN_FREE), option="min_free"),
        max_age_seconds=parse_consistency(settings.get("consistency", DEFAULT_CONSISTENCY)),
        native=_parse_bool(settings.get("native", True), option="native"),
        members=_parse_members(settings),
        cluster_token=_parse_token(settings.get("cluster_token")),
        tls=_parse_tls(settings.get("tls")),
        replicas=_parse_replicas(settings.get("replicas", 1)),
    )


def resolve_limits(
    arguments: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, file: Mapping[str, Any] | None = None
) -> LimitOptions:
    """Combine `LIMIT_NAMES` of `arguments` (None means not given), environment and file, as `resolve` does.

    A node without a place for a cache has no `directory`, which is no error here: an origin can be used without a cache.
    Raises `ConfigurationError` for a value that cannot be used.
    """
    environ = os.environ if environ is None else environ
    settings = _settings(arguments, environ, load_file(environ) if file is None else file)
    max_requests, rate = _parse_limits(settings)
    directory: Path | None = None
    if settings.get("cache_dir") is not None or _has_home(environ):
        directory = _parse_cache_dirs(settings.get("cache_dir"), environ)[0]
    return LimitOptions(max_requests=max_requests, requests_per_second=rate, directory=directory)


def _parse_limits(settings: Mapping[str, Any]) -> tuple[int | None, float | None]:
    return _parse_max_requests(settings.get("max_requests")), parse_rate(settings.get("request_rate"))


def _has_home(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("XDG_CACHE_HOME") or environ.get("HOME")) or os.path.expanduser("~") != "~"


def _settings(arguments: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any]) -> dict[str, Any]:
    """What was said about each option: its argument, else its variable, else the entry of the file. `ConfigurationError`."""
    _warn_of_variables(environ)
    settings: dict[str, Any] = {name: file[name] for name in OPTION_NAMES if name in file}
    for name in OPTION_NAMES:
        variable = environ.get(f"MILLRACE_{name.upper()}")
        if variable:
            # Several disks in one variable are separated like PATH; an argument or the file gives a list.
            settings[name] = variable.split(os.pathsep) if name == "cache_dir" else variable
    settings.update({name: value for name, value in arguments.items() if value is not None})
    _check_names(settings)
    return settings
