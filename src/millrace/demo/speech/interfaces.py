"""The network interfaces of this machine."""

from __future__ import annotations

import socket
import struct

_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str | None:
    """The interface of this machine that has an IPv4 address; None where none has it, or the system cannot be asked."""
    try:
        import fcntl

        wanted = socket.inet_aton(address)
    except (ImportError, OSError):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if answer[20:24] == wanted:
                return name
    return None
