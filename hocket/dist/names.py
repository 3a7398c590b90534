"""Addresses of hosts' names, also of names that come to be known late. Knows nothing of who listens there; torch-free."""

from __future__ import annotations

import ipaddress
import socket

from hocket.errors import ConfigError


def resolved(address: str) -> str:
    """The IPv4 address of a name. Raises ConfigError where there is none."""
    try:
        found = socket.getaddrinfo(address, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        allowed = f"an IPv4 address or a name of one ({error.strerror})"
        raise ConfigError("data_parallel_address", address, allowed) from None
    return str(found[0][4][0])


def is_name(address: str) -> bool:
    """Whether another address may be found for it later."""
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return True
    return False
