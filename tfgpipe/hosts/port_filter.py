"""Closes TensorFlow's port to strangers.

TensorFlow's server has no authentication, and listens on all addresses, with no
option for it. But its socket is one of this process, and on Linux a process may
give its sockets a filter: a program of the kernel (classic BPF) that looks at
each packet, and drops it before anything has answered. So no privilege is
needed, and no firewall is changed.

The filter lets through what comes from this host, to itself, and from addresses
that are added when the other hosts are known. To be filtered is no secrecy:
what goes between hosts is not encrypted.

References: [Linux](https://docs.kernel.org/networking/filter.html), socket
filters; McCanne and Jacobson, 1993, the packet filter of BSD.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import stat
import struct
from collections.abc import Iterable, Sequence

_SO_ATTACH_FILTER = 26  # of Linux
_HEADER = -0x100000  # where the header of the network's layer begins
_LOAD, _LOAD_BYTE, _AND, _TO_X = 0x20, 0x30, 0x54, 0x07
_JUMP, _IS, _IS_X, _RETURN = 0x05, 0x15, 0x1D, 0x06
_SOURCE = {4: 12, 6: 8}  # where the header has it; the goal comes after

# An operation, how many to leave out if it is true, and if not, and a number.
_Line = tuple[int, int, int, int]
_DROP = (_RETURN, 0, 0, 0)
_PASS = (_RETURN, 0, 0, 0xFFFFFFFF)


def close_to_strangers(port: int, friends: Iterable[str] = ()) -> None:
    """Has all sockets of this process that listen on a port drop strangers.

    Again, with others, it replaces what was given before. Connections that are
    open are not looked at.

    Args:
        port: Of TensorFlow's server, in this process.
        friends: Addresses of hosts that may connect, besides this one.

    Raises:
        OSError: If this system has no such filters, or no such socket.
    """
    code = program([ipaddress.ip_address(friend) for friend in friends])
    buffer = ctypes.create_string_buffer(code)
    given = struct.pack("HL", len(code) // 8, ctypes.addressof(buffer))
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed meanwhile
            continue
        with copy:
            is_of_network = copy.family in (socket.AF_INET, socket.AF_INET6)
            listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_of_network and listens and copy.getsockname()[1] == port:
                copy.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, given)
                count += 1
    if not count:
        raise OSError("this process has no such socket")


def restrict(port: int, names: Iterable[str], others: str, closes: bool) -> str:
    """Closes a port to all but hosts of some names; says to whom it is open.

    `others` says who these are; `closes` is whether it may be closed.
    """
    problem = "any host is allowed"
    if closes:
        try:
            close_to_strangers(port, addresses_of(names))
        except OSError as error:
            problem = str(error)
        else:
            return (
                f"TensorFlow's port {port} is open to users of this host and "
                f"of {others}, without a secret, and closed to all else."
            )
    return (
        f"TensorFlow's port {port} is open to everybody who can reach this "
        f"host, without a secret, because {problem}: let a firewall close it; "
        "docs/hosts.md has how."
    )


def addresses_of(names: Iterable[str]) -> list[str]:
    """Returns the addresses of hosts, by their names or addresses."""
    addresses = set()
    for name in names:
        with contextlib.suppress(OSError):  # told when it is to be reached
            for *_, address in socket.getaddrinfo(name, None):
                addresses.add(str(address[0]).partition("%")[0])
    return sorted(addresses)


def program(
    friends: Iterable[ipaddress.IPv4Address | ipaddress.IPv6Address],
) -> bytes:
    """Returns the filter, as the kernel takes it, that lets friends through."""
    known = {getattr(one, "ipv4_mapped", None) or one for one in friends}
    four, six = (
        _of_version(
            v, [f.packed for f in sorted(known, key=str) if f.version == v]
        )
        for v in (4, 6)
    )
    lines = [
        (_LOAD_BYTE, 0, 0, _HEADER),
        (_AND, 0, 0, 0xF0),  # the version
        (_IS, 0, 1, 0x40),
        (_JUMP, 0, 0, len(six)),
        *six,
        *four,
    ]
    return b"".join(
        struct.pack("HBBI", *line[:3], line[3] & 0xFFFFFFFF) for line in lines
    )


def _of_version(version: int, friends: list[bytes]) -> list[_Line]:
    """Lets a packet pass that this host sends to itself, or a friend."""
    words = {4: 1, 6: 4}[version]
    lines = _passing(version, [None] * words)
    if version == 4:  # from one address of 127.0.0.0/8 to another
        lines.append((_LOAD, 0, 0, _HEADER + _SOURCE[4]))
        lines += [(_AND, 0, 0, 0xFF000000), (_IS, 0, 1, 127 << 24), _PASS]
    for friend in friends:
        lines += _passing(version, struct.unpack(f"!{words}I", friend))
    return [*lines, _DROP]


def _passing(version: int, words: Sequence[int | None]) -> list[_Line]:
    """Lets a packet pass from an address; None are words of its goal."""
    lines = [_PASS]
    for i, word in reversed([*enumerate(words)]):
        at = _HEADER + _SOURCE[version] + 4 * i
        load: list[_Line] = [(_LOAD, 0, 0, at)]
        if word is None:
            goal = at + 4 * len(words)
            load = [(_LOAD, 0, 0, goal), (_TO_X, 0, 0, 0), *load]
        code = _IS_X if word is None else _IS
        lines = [*load, (code, 0, len(lines), word or 0), *lines]
    return lines
