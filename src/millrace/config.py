"""Options of the file system and of a node: from arguments, `MILLRACE_*` variables, `millrace.toml`, and defaults.

The order is argument, environment, file, default. Parsing is pure; only `load_file` touches the disk. Arguments travel in
a file system's pickle; environment and file are read again by the receiver, since paths and disks differ per node.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.errors import ConfigurationError

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

# The keyword arguments of the face that are options of the cache, in the order of the documentation.
# Those of the cluster cache are recognised, and refused as not in this version, rather than called unknown.
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
)


@dataclass(frozen=True)
class Amount:
    """So many bytes, or such a share of the disk's size. Exactly one of the two is set."""

    nbytes: int | None = None
    share: float | None = None

    def of(self, disk_bytes: int) -> int:
        """The amount in bytes on a disk of `disk_bytes`."""
        return self.nbytes if self.nbytes is not None else int((self.share or 0.0) * disk_bytes)


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Everything that a node's cache is built from. Hashable: equal options share one cache in a process.

    `max_age_seconds` is how long metadata is believed: `inf` for ever (`"immutable"`), 0 never (`"always"`).
    `native=False` reads by `pread` with a checksum every time instead of through memory maps.
    """

    cache_dirs: tuple[Path, ...]
    capacity: Amount
    min_free: Amount
    max_age_seconds: float
    native: bool
    members: str


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
        members = f"etcd://{settings['etcd_host']}:{settings.get('etcd_port') or 2379}"
    members = str(members or "auto")
    if members in ("auto", "none"):
        return members
    if members == "ray" or members.startswith(("etcd://", "static://")):
        raise ConfigurationError(
            f"members={members!r} needs the cluster cache, which this version does not have",
            next_step="use members='none': every node caches for itself",
        )
    raise ConfigurationError(
        f"members={members!r} is not known",
        next_step="use 'auto', 'none', 'ray', 'etcd://host:port' or 'static://host:port'",
    )


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
            with open(path, "rb") as file:
                settings = tomllib.load(file)
        except FileNotFoundError:
            if named:
                raise ConfigurationError(
                    f"MILLRACE_CONFIG={named} does not exist", next_step="correct or unset it"
                ) from None
            continue
        except OSError as error:
            raise ConfigurationError(f"{path}: {error.strerror}", next_step="correct the file") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path} is not UTF-8, as TOML must be", next_step="save it as UTF-8") from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigurationError(f"{path}: {error}", next_step="correct the file") from error
        _check_names(settings, source=f"{path}: ")
        return settings
    return {}


def _check_names(names: Iterable[str], *, source: str = "") -> None:
    """Raise `ConfigurationError` for a name that is no option. `source` comes first in the message."""
    unknown = sorted(set(names) - set(OPTION_NAMES))
    if unknown:
        raise ConfigurationError(
            f"{source}unknown option {', '.join(map(repr, unknown))}",
            next_step=f"known ones are {', '.join(OPTION_NAMES)}",
        )


def resolve(
    arguments: Mapping[str, Any], *, environ: Mapping[str, str] | None = None, file: Mapping[str, Any] | None = None
) -> CacheOptions:
    """Combine `arguments` (None means not given), environment, file and defaults into `CacheOptions`.

    Raises `ConfigurationError` for a value that cannot be used. `environ` and `file` default to the real ones.
    """
    environ = os.environ if environ is None else environ
    file = load_file(environ) if file is None else file
    settings: dict[str, Any] = {name: file[name] for name in OPTION_NAMES if name in file}
    for name in OPTION_NAMES:
        variable = environ.get(f"MILLRACE_{name.upper()}")
        if variable:
            # Several disks in one variable are separated like PATH; an argument or the file gives a list.
            settings[name] = variable.split(os.pathsep) if name == "cache_dir" else variable
    settings.update({name: value for name, value in arguments.items() if value is not None})
    _check_names(settings)
    for name in ("cluster_token", "tls"):
        if name in settings:  # without its value, which is a secret
            raise ConfigurationError(
                f"{name} is an option of the cluster cache, which this version does not have",
                next_step="leave it out: every node caches for itself",
            )
    return CacheOptions(
        cache_dirs=_parse_cache_dirs(settings.get("cache_dir"), environ),
        capacity=parse_amount(settings.get("capacity", DEFAULT_CAPACITY), option="capacity"),
        min_free=parse_amount(settings.get("min_free", DEFAULT_MIN_FREE), option="min_free"),
        max_age_seconds=parse_consistency(settings.get("consistency", DEFAULT_CONSISTENCY)),
        native=_parse_bool(settings.get("native", True), option="native"),
        members=_parse_members(settings),
    )
