"""Options of the file system and of a node: from arguments, `MILLRACE_*` variables, `millrace.toml`, and defaults.

The order is argument, environment, file, default. Parsing is pure; only `load_file` touches the disk. Arguments travel in
a file system's pickle; environment and file are read again by the receiver, since paths and disks differ per node.
"""

from __future__ import annotations

import logging
import math
import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.errors import ConfigurationError, printable
from millrace.option_types import CacheArguments

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

SILENCE_SECONDS = 2.0
"""How long a read waits for another process, on this node or another one, without a heartbeat."""

WORKING_SECONDS = 180.0
"""How long a read waits for another process that is still fetching its block. A request to an origin fails earlier."""

LOCAL_FOLDER = "local"
"""The directory, inside a cache directory, of a single node and of the first node of a cluster on a machine."""

_MOST_BYTES = 2**60
_MOST_SECONDS = 1e10  # three centuries; a timestamp this far ahead can still be computed
_MOST_SHOWN = 100
_MOST_FILE_BYTES = 1 << 20
_DIGITS = re.compile(r"[0-9]{1,18}")

_CLUSTER_NAME = re.compile(r"[A-Za-z0-9._-]+")

_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?")

_TLS_FILES = ("cert", "key", "ca")

OPTION_NAMES = tuple(CacheArguments.__annotations__)
"""The options of the cache, in the order of the documentation."""

SECRET_NAMES = frozenset({"cluster_token"})
"""The options whose values are secrets."""

_OTHER_VARIABLES = frozenset(
    {
        "MILLRACE_CONFIG",
        "MILLRACE_DEBUG",
        "MILLRACE_JOB",
        "MILLRACE_PRICE_PER_1000_REQUESTS",
        "MILLRACE_PRICE_PER_GB",
        "MILLRACE_PUBLIC_METRICS",
    }
)
# The variables that Kubernetes sets in every pod next to a service of that name.
_OF_A_SERVICE = re.compile(r"MILLRACE_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP|SCTP)(_.*)?)?)")
_reported_variables: set[str] = set()

LIMIT_NAMES = ("cache_dir", "max_requests", "request_rate", "timeout")
"""The options that limit the requests of a node to an origin, their duration, and the directory that its processes share."""

LEAST_TIMEOUT_SECONDS = 1.0
"""The shortest `timeout`: a shorter one would end requests that a healthy service completes."""

MOST_REQUESTS = 1024
"""The largest `max_requests`."""


@dataclass(frozen=True)
class Amount:
    """A number of bytes, or a share of the disk's size. Exactly one of the two is set."""

    nbytes: int | None = None
    share: float | None = None

    def text(self) -> str:
        """The amount as it is written in an option: `7GB`, `64MiB` or `80%`, in the largest unit without a fraction."""
        if self.nbytes is None:
            return f"{round(100 * (self.share or 0.0), 6):g}%"
        units = sorted(_UNITS.items(), key=lambda unit: -unit[1])
        name, size = next((unit for unit in units if self.nbytes and self.nbytes % unit[1] == 0), ("B", 1))
        return f"{self.nbytes // size}{(name or 'B').replace('IB', 'iB')}"


@dataclass(frozen=True, kw_only=True)
class Tls:
    """The files (PEM) of a node of a cluster with TLS: its certificate, its key, and the members' authority."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The options of a node's cache. Hashable: equal options share one cache in a process.

    `max_age_seconds` is how long metadata is fresh: `inf` without end (`"immutable"`), 0 never (`"always"`).
    `native=False` reads by `pread` with a checksum every time instead of through memory maps.
    `members` is how the cluster is found: `"auto"`, `"none"`, `"ray"`, `"etcd://..."` or `"static://..."`. `replicas` is
    the number of nodes that keep each block. `folder` is internal: the directory of a node inside the cache directories.
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

    @property
    def names_cluster(self) -> bool:
        """Whether this process now takes part in a cluster; with `"auto"` and `"ray"` only inside a Ray job."""
        return is_in_ray() if self.members in BY_RAY else self.members != "none"


BY_RAY = ("auto", "ray")
"""Values of `members` for which Ray names the node of this machine."""


def is_in_ray() -> bool:
    """Whether this process is part of a Ray job. Does not import ray, which processes in a job have imported."""
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


@dataclass(frozen=True, kw_only=True)
class LimitOptions:
    """The limits of this node's requests to one origin. None: not set.

    `max_requests` is the most requests in flight; `requests_per_second` the most that begin. `timeout_seconds` is how long
    one operation may take, with all attempts. In `directory` the processes of the node share the first two; it is None when
    this user has no directory for a cache.
    """

    max_requests: int | None
    requests_per_second: float | None
    timeout_seconds: float | None
    directory: Path | None


def absolute_path(path: str) -> str:
    """`path` as an absolute path, `~` expanded. Raises `ConfigurationError` if the working directory was deleted."""
    try:
        return os.path.abspath(os.path.expanduser(path))
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path}: the working directory does not exist any more",
            next_step="change to another one, or give an absolute path",
        ) from error


def parse_amount(value: str | int, *, option: str) -> Amount:
    """Parse `"200GB"`, `"64MiB"`, `123` or `"80%"`. Raises `ConfigurationError` naming `option`.

    Also for a text such as `"10"`, below 1 MiB: a forgotten unit, which would empty the cache.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_BYTES:
        return Amount(nbytes=value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match:
        number, unit = float(match[1]), match[2].upper()
        if unit == "%" and number <= 100:
            return Amount(share=number / 100)
        if not unit and 0 < number < 1 << 20:
            raise ConfigurationError(
                f"{option}={shown(value)} has no unit", next_step=f"write '{match[1]}GB', or '{match[1]}B' for bytes"
            )
        if unit in _UNITS and number * _UNITS[unit] <= _MOST_BYTES:
            return Amount(nbytes=int(number * _UNITS[unit]))
    raise ConfigurationError(
        f"{option}={shown(value)} is not a size",
        next_step="write bytes, a size such as '200GB', or a share such as '80%'",
    )


def parse_consistency(value: str | float) -> float:
    """Parse `"immutable"`, `"always"` or a time such as `"60s"` into the seconds that metadata is fresh."""
    if value in ("immutable", math.inf):
        return math.inf
    if value == "always":
        return 0.0
    seconds = _seconds(value)
    if seconds is not None:
        return seconds
    raise ConfigurationError(
        f"consistency={shown(value)} is not known", next_step="write 'immutable', 'always' or a time such as '60s'"
    )


def parse_seconds(value: str | float, *, option: str) -> float:
    """Parse a time such as `"1d"`, `"12h"`, `"90s"` or `90` into seconds. Raises `ConfigurationError` naming `option`."""
    seconds = _seconds(value)
    if seconds:
        return seconds
    raise ConfigurationError(
        f"{option}={shown(value)} is not a time", next_step="write a time such as '90s', '12h' or '7d'"
    )


def _seconds(value: object) -> float | None:
    """A number of seconds, or a text such as `"12h"`, in seconds; None for anything else and above `_MOST_SECONDS`."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST_SECONDS:
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _SECONDS:
        return None
    seconds = float(match[1]) * _SECONDS[match[2].upper()]
    return seconds if seconds <= _MOST_SECONDS else None


def _whole_number(value: object, most: int) -> int | None:
    """A number from 1 to `most`, or its digits as a text; None for anything else."""
    if isinstance(value, bool):
        return None
    number = value if isinstance(value, int) else 0
    if not number and _DIGITS.fullmatch(text := str(value).strip()):  # Python refuses to parse thousands of digits
        number = int(text)
    return number if 1 <= number <= most else None


def shown(value: object) -> str:
    """The `repr` of a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a number that is too large"
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _parse_members(settings: Mapping[str, Any]) -> str:
    members = settings.get("members")
    if settings.get("etcd_host"):
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
    if scheme and separator and addresses and scheme.lower() not in ("etcd", "static"):
        return members  # of another membership backend, checked when a file system or node is created
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
        if (
            not separator
            or not _HOST.fullmatch(bare)
            or not _can_be_looked_up(bare)
            or port != port.strip()
            or (number := _whole_number(port, 65535)) is None
        ):
            raise ConfigurationError(
                f"{option}: an address with a user or a password cannot be used"  # without its value
                if "@" in part
                else f"{option}: {shown(part.strip())} is not an address",
                next_step="write host:port, several with commas between",
            )
        found.append((bare, number))
    return tuple(found)


def _can_be_looked_up(host: str) -> bool:
    """Whether `host` can be part of a DNS query. Otherwise the `socket` functions raise a `UnicodeError`."""
    try:
        host.encode("idna")
    except UnicodeError:  # an empty part, or one of more than 63 characters
        return False
    return True


def address_text(host: str, port: int) -> str:
    """The reverse of `parse_addresses` for one: `host:port`, IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parse_token(value: Any) -> str | None:
    if value in (None, ""):
        return None
    if not isinstance(value, str) or not value.isascii() or not value.isprintable() or " " in value or len(value) < 8:
        raise ConfigurationError(  # without its value, which is a secret
            "cluster_token cannot be used", next_step="write at least 8 printable ASCII characters without spaces"
        )
    return value


def _parse_tls(value: Any) -> Tls | None:
    """A mapping of `cert`, `key` and `ca` to files, or a folder that holds `cert.pem`, `key.pem` and `ca.pem`."""
    if value in (None, "", False):
        return None
    if isinstance(value, Mapping) and sorted(value) == sorted(_TLS_FILES):
        files = {name: Path(absolute_path(str(value[name]))) for name in _TLS_FILES}
    elif isinstance(value, str | os.PathLike):
        folder = Path(absolute_path(os.fspath(value)))
        files = {name: folder / f"{name}.pem" for name in _TLS_FILES}
    else:
        raise ConfigurationError(
            "tls is neither a folder nor a mapping of 'cert', 'key' and 'ca'",
            next_step="name a folder with cert.pem, key.pem and ca.pem",
        )
    return Tls(**files)


def _parse_replicas(value: Any) -> int:
    number = _whole_number(value, 16)
    if number is not None:
        return number
    raise ConfigurationError(f"replicas={shown(value)} cannot be used", next_step="write a number from 1 to 16")


def _parse_max_requests(value: Any) -> int | None:
    if value is None:
        return None
    number = _whole_number(value, MOST_REQUESTS)
    if number is not None:
        return number
    raise ConfigurationError(
        f"max_requests={shown(value)} cannot be used", next_step=f"write a number from 1 to {MOST_REQUESTS}"
    )


def parse_rate(value: Any) -> float | None:
    """Parse `200`, `"200/s"` or `"5000/5min"` into requests per second; None and `"none"` mean no limit.

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
            f"request_rate={shown(value)} is not a rate",
            next_step="write requests a second, or a rate such as '5000/5min'",
        ) from error
    return rate


def parse_timeout(value: Any) -> float | None:
    """Parse the option `timeout`, such as `30` or `"2min"`, into seconds; None and `"none"` mean no limit.

    Raises `ConfigurationError`.
    """
    if value is None or value == "none":
        return None
    seconds = parse_seconds(value, option="timeout")
    if seconds < LEAST_TIMEOUT_SECONDS:
        raise ConfigurationError(
            f"timeout={shown(value)} is below {LEAST_TIMEOUT_SECONDS:g} s",
            next_step="write a longer time such as '30s'",
        )
    return seconds


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


def anchored(cache_dir: Any) -> Any:
    """The option `cache_dir` with relative paths made absolute, for a process with another working directory.

    A path that begins with `~` stays, because the home directory may differ. Raises as `absolute_path`.
    """
    if isinstance(cache_dir, list | tuple):
        return [anchored(part) for part in cache_dir]
    text = os.fspath(cache_dir) if isinstance(cache_dir, str | os.PathLike) else ""
    return absolute_path(text) if isinstance(text, str) and text and text[0] not in "/~" else cache_dir


def _parse_directory(part: Any) -> Path:
    if isinstance(part, str | os.PathLike):
        try:
            path = os.path.expanduser(os.fspath(part))
            if isinstance(path, str) and not path.startswith("~"):
                path.encode()
                return Path(os.path.realpath(path))
        except (ValueError, FileNotFoundError):
            # A null character, bytes that are not UTF-8, which LMDB requires, or a deleted working directory.
            pass
    raise ConfigurationError(
        f"cache_dir={shown(part)} is not a directory", next_step="write a path, or a list of paths"
    )


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
    raise ConfigurationError(f"{option}={shown(value)} is neither true nor false", next_step="write true or false")


def load_file(environ: Mapping[str, str]) -> dict[str, Any]:
    """Read the configuration file: `$MILLRACE_CONFIG`, else `millrace.toml` here, else the user's; `{}` where none is.

    Raises `ConfigurationError` when the file named does not exist, is not TOML, or has an unknown key.
    """
    return find_file(environ)[1]


def find_file(environ: Mapping[str, str]) -> tuple[str | None, dict[str, Any]]:
    """The configuration file's path (None without a file) and its content. Raises `ConfigurationError` as `load_file`."""
    named = environ.get("MILLRACE_CONFIG")
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    candidates = [named] if named else ["millrace.toml", os.path.join(home, "millrace", "millrace.toml")]
    for path in candidates:
        try:
            if not named and stat.S_ISFIFO(os.stat(path).st_mode):  # a read would wait until another process writes
                raise ConfigurationError(f"{path} is a pipe, not a file", next_step="rename or remove it")
            with open(path, "rb") as file:
                text = file.read(_MOST_FILE_BYTES + 1)
        except FileNotFoundError:
            if named:
                raise ConfigurationError(
                    f"MILLRACE_CONFIG={named} does not exist", next_step="correct or unset it"
                ) from None
            continue
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}", next_step="correct the file") from error
        if len(text) > _MOST_FILE_BYTES:  # also a device without end
            raise ConfigurationError(
                f"{path} is larger than {_MOST_FILE_BYTES >> 20} MiB", next_step="correct the file"
            )
        return path, _parse_file(path, text)
    return None, {}


def _parse_file(path: str, text: bytes) -> dict[str, Any]:
    import tomllib  # every new worker would spend 2 ms on it, and hardly any node has such a file

    try:
        settings = tomllib.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not UTF-8, as TOML must be", next_step="save it as UTF-8") from error
    except RecursionError as error:
        raise ConfigurationError(f"{path}: its values are nested too deep", next_step="correct the file") from error
    except ValueError as error:  # not TOML, or a number of thousands of digits
        raise ConfigurationError(f"{path}: {error}", next_step="correct the file") from error
    _check_names(settings, source=f"{path}: ")
    return settings


def _check_names(names: Iterable[str], *, source: str = "") -> None:
    """Raise `ConfigurationError` for a name that is not an option. `source` comes first in the message."""
    unknown = sorted(set(names) - set(OPTION_NAMES))
    if unknown:
        raise unknown_names(f"{source}unknown option", unknown, OPTION_NAMES)


def unknown_names(problem: str, unknown: Sequence[str], known: Sequence[str], *, hint: str = "") -> ConfigurationError:
    """The error for names that are not among the `known`: it offers the nearest one, then lists all, then the `hint`."""
    from difflib import get_close_matches  # rarely needed

    near = [match for name in unknown for match in get_close_matches(name, known, 1)]
    meant = f"is {near[0]!r} meant? " if near else ""
    return ConfigurationError(
        f"{problem} {', '.join(map(repr, unknown))}", next_step=f"{meant}known ones are {', '.join(known)}{hint}"
    )


def _warn_of_variables(environ: Mapping[str, str]) -> None:
    """Log unknown `MILLRACE_*` variables, once per process. Not an error: another program may use them."""
    known = {f"MILLRACE_{name.upper()}" for name in OPTION_NAMES} | _OTHER_VARIABLES
    for name in sorted(name for name in environ if name.startswith("MILLRACE_") and name not in known):
        if name in _reported_variables or _OF_A_SERVICE.fullmatch(name):
            continue
        _reported_variables.add(name)
        from difflib import get_close_matches  # rarely needed

        near = get_close_matches(name, sorted(known), 1, 0.0)[0]
        _log.warning("the environment variable %s is not an option of Millrace: is %s meant?", printable(name), near)


def resolve(
    arguments: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, file: Mapping[str, Any] | None = None
) -> CacheOptions:
    """Combine `arguments` (None means not given), environment, file and defaults into `CacheOptions`.

    Raises `ConfigurationError` for a value that cannot be used. `environ` and `file` default to the real ones.
    """
    environ = os.environ if environ is None else environ
    settings = _settings(arguments, environ, load_file(environ) if file is None else file)
    _parse_limits(settings)  # used when an origin is opened; a mistake in them also shows here
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

    Without a directory for a cache, `directory` is None. This is not an error: an origin can be used without a cache.
    Raises `ConfigurationError` for a value that cannot be used.
    """
    environ = os.environ if environ is None else environ
    settings = _settings(arguments, environ, load_file(environ) if file is None else file)
    max_requests, rate, timeout = _parse_limits(settings)
    directory: Path | None = None
    if settings.get("cache_dir") is not None or _has_home(environ):
        directory = _parse_cache_dirs(settings.get("cache_dir"), environ)[0]
    return LimitOptions(
        max_requests=max_requests, requests_per_second=rate, timeout_seconds=timeout, directory=directory
    )


@dataclass(frozen=True, kw_only=True)
class EffectiveOption:
    """An option as this process uses it. `source` is `argument`, a variable, the path of the file, or `default`.

    `value` is as it was written; None means none. A secret is only `set`.
    """

    name: str
    value: Any
    source: str


def effective_options(
    arguments: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] | None = None
) -> list[EffectiveOption]:
    """Every option with its value and its source, in the order of the documentation.

    Raises `ConfigurationError` for a value that cannot be used, as `resolve` does.
    """
    environ = os.environ if environ is None else environ
    path, file = find_file(environ)
    given = {name: value for name, value in (arguments or {}).items() if value is not None}
    options = resolve(given, environ=environ, file=file)
    settings = _settings(given, environ, file)
    defaults: dict[str, Any] = {
        "cache_dir": [str(each) for each in options.cache_dirs],
        "capacity": DEFAULT_CAPACITY,
        "min_free": DEFAULT_MIN_FREE,
        "members": "auto",
        "consistency": DEFAULT_CONSISTENCY,
        "native": True,
        "replicas": 1,
    }

    def source_of(name: str) -> str:
        variable = f"MILLRACE_{name.upper()}"
        if name in given:
            return "argument"
        if environ.get(variable, "").strip():
            return variable
        return str(path) if name in file else "default"

    found = []
    for name in OPTION_NAMES:
        value, source = settings.get(name, defaults.get(name)), source_of(name) if name in settings else "default"
        if name == "members" and settings.get("etcd_host"):
            value, source = options.members, source_of("etcd_host")
        if name in SECRET_NAMES and value is not None:
            value = "set"
        found.append(EffectiveOption(name=name, value=value, source=source))
    return found


def _parse_limits(settings: Mapping[str, Any]) -> tuple[int | None, float | None, float | None]:
    return (
        _parse_max_requests(settings.get("max_requests")),
        parse_rate(settings.get("request_rate")),
        parse_timeout(settings.get("timeout")),
    )


def _has_home(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("XDG_CACHE_HOME") or environ.get("HOME")) or os.path.expanduser("~") != "~"


def _settings(arguments: Mapping[str, Any], environ: Mapping[str, str], file: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each option: its argument, else its variable, else the entry of the file. Raises `ConfigurationError`."""
    _warn_of_variables(environ)
    variables: dict[str, Any] = {}
    for name in OPTION_NAMES:
        variable = environ.get(f"MILLRACE_{name.upper()}", "").strip()
        if variable:
            # Several disks in one variable are separated like PATH; an argument or the file has a list.
            variables[name] = variable.split(os.pathsep) if name == "cache_dir" else variable
    given = {name: value for name, value in arguments.items() if value is not None}
    # A number that a person has written may lack its unit, unlike that of a program.
    amounts = {name: str(file[name]) for name in ("capacity", "min_free") if type(file.get(name)) is int}
    settings: dict[str, Any] = {}
    for source, layer in (
        ("the file has", {**file, **amounts}),
        ("the environment has", variables),
        ("the arguments have", given),
    ):
        if layer.get("etcd_host") and layer.get("members") not in (None, "auto"):
            raise ConfigurationError(
                f"{source} both etcd_host and members, which exclude each other", next_step="give one of them"
            )
        # Both name the cluster: each replaces the other one of a weaker source.
        if layer.get("etcd_host"):
            settings.pop("members", None)
        elif layer.get("members"):
            settings.pop("etcd_host", None)
        settings.update(layer)
    _check_names(settings)
    # A secret that was read from a file often ends in a newline. Paths are not changed.
    return {
        name: value.strip() if isinstance(value, str) and name not in ("cache_dir", "tls") else value
        for name, value in settings.items()
    }
