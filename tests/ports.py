"""A port for a server that is told its port before it starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A port nobody listens on, outside the range that the system gives out to whoever asks for any.

    Between this call and the server's own bind other processes open connections; one of those could otherwise be given
    this very port.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(1024, lowest), k=100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"no free port among 100 tried in [1024, {lowest})")
