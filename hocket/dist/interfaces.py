"""Which network interface leads to another host. Knows nothing of what is sent; torch-free."""

from __future__ import annotations

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9


def interface_to(address: str) -> str | None:
    """The interface whose IPv4 address packets to `address` (a name or IPv4) leave from; None where it cannot be told.

    Nothing is sent. Interfaces with several addresses are known by their first.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, _ANY_PORT))
        except OSError:
            return None
        own = probe.getsockname()[0]
        if own.startswith("127."):
            return "lo"
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == own:
                return name
    return None
