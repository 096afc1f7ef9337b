"""The first process of a machine: creates its directories and files, reports that, and then only reaps.

Started with namespaces of its own for mounts and processes, and one argument, JSON:
    folders  {path: folder that is seen there instead}
    files    {path: file that is seen there instead}
    memory   {path: bytes that a file system in memory may take there}
    keep     [path that stays what it was, though it is below one of those]
    hostname
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    if _libc.mount(*(text.encode() for text in (source, target, kind)), ctypes.c_ulong(flags), data.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def settle(folders: dict[str, str], files: dict[str, str], memory: dict[str, int], keep: list[str]) -> None:
    """Mount everything. Kept paths, and sources in a folder that will be hidden, are opened before."""
    mount("none", "/", "none", MS_REC | MS_PRIVATE)
    hidden = [os.path.realpath(path) + "/" for path in (*folders, *memory)]
    held = {}
    for path in keep:
        if any(f"{path}/".startswith(each) for each in hidden) and f"{path}/" not in hidden:
            held[path] = os.open(path, os.O_PATH)
    sources = {path: os.open(source, os.O_PATH) for path, source in (folders | files).items()}
    for path in files:
        if os.path.exists(path):
            mount(f"/proc/self/fd/{sources[path]}", path, "none", MS_BIND)
    for path in folders:
        mount(f"/proc/self/fd/{sources[path]}", path, "none", MS_BIND)
    for path, nbytes in memory.items():
        mount("tmpfs", path, "tmpfs", MS_NOSUID | MS_NODEV, f"size={nbytes},mode=1777")
    for path, descriptor in held.items():
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, "none", MS_BIND | MS_REC)


def main() -> None:
    settings = json.loads(sys.argv[1])
    with open("/proc/sys/kernel/hostname", "w") as file:
        file.write(settings.pop("hostname"))
    settle(**settings)
    os.closerange(3, 256)
    os.chdir("/")
    print("ready", flush=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass


if __name__ == "__main__":
    main()
