"""A port is open to this host and its friends alone."""

import ipaddress
import os
import socket
import struct

import pytest

from tfgpipe.hosts import port_filter


def passes(code, source, goal):
    """What the kernel does: runs the program on the header of a packet."""
    source, goal = map(ipaddress.ip_address, (source, goal))
    front = b"\x45" + bytes(11) if source.version == 4 else b"\x60" + bytes(7)
    header = front + source.packed + goal.packed
    lines = [*struct.iter_unpack("HBBI", code)]
    a = x = at = 0
    while True:
        code, true, false, k = lines[at]
        at += 1
        offset = (k + 0x100000) & 0xFFFFFFFF
        if code == 0x30:
            a = header[offset]
        elif code == 0x20:
            (a,) = struct.unpack_from("!I", header, offset)
        elif code == 0x54:
            a &= k
        elif code == 0x07:
            x = a
        elif code == 0x05:
            at += k
        elif code in (0x15, 0x1D):
            at += true if a == (x if code == 0x1D else k) else false
        else:
            assert code == 0x06
            return k != 0


FRIENDS = ["10.9.0.2", "10.9.0.3", "fd00::2", "::ffff:10.9.0.4"]
MANY = [f"10.8.{i // 200}.{i % 200}" for i in range(600)]


@pytest.mark.parametrize(
    ("friends", "source", "goal", "expected"),
    [
        ([], "127.0.0.1", "127.0.0.1", True),
        ([], "127.0.0.1", "127.0.0.7", True),
        ([], "10.9.0.1", "10.9.0.1", True),
        ([], "10.9.0.2", "10.9.0.1", False),
        ([], "::1", "::1", True),
        ([], "fd00::1", "fd00::1", True),
        ([], "fd00::2", "fd00::1", False),
        (FRIENDS, "10.9.0.2", "10.9.0.1", True),
        (FRIENDS, "10.9.0.3", "10.9.0.1", True),
        (FRIENDS, "10.9.0.4", "10.9.0.1", True),
        (FRIENDS, "10.9.0.5", "10.9.0.1", False),
        (FRIENDS, "fd00::2", "fd00::1", True),
        (FRIENDS, "fd00::3", "fd00::1", False),
        (FRIENDS, "fd01::2", "fd00::1", False),
        (MANY, "10.8.2.199", "10.9.0.1", True),
        (MANY, "10.9.2.199", "10.9.0.1", False),
    ],
)
def test_packets_of_strangers_are_dropped(friends, source, goal, expected):
    code = port_filter.program([ipaddress.ip_address(f) for f in friends])
    assert passes(code, source, goal) == expected


def test_kernel_takes_the_filter_and_this_host_may_still_connect():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        before = len(os.listdir("/proc/self/fd"))
        for friends in ([], FRIENDS, MANY):
            port_filter.close_to_strangers(port, friends)
            socket.create_connection(("127.0.0.1", port), 5).close()
        assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(OSError, match="no such socket"):
        port_filter.close_to_strangers(port)
