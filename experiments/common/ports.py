"""Ports at which processes of this host meet."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One of this host that nobody listens on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
