"""Where a learner rank listens for remote actors, and the secret that both sides know."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

LEAST_SECRET = 32
"""Bytes."""


@dataclass(frozen=True)
class Listening:
    """Where this job's ranks listen; rank r on ``port + r``.

    Attributes:
        host: address of one interface, or its name (``eth0``, the same on every node).
        port: of rank 0; 0 takes a free one on every rank.
        secret: known to the job's processes and to nobody else.
        description: what actors build suite and policy from; plain JSON, sent as it is.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    description: Mapping[str, Any]

    def socket(self, rank: int) -> socket.socket:
        """Return the listening socket of ``rank``.

        Raises:
            OSError: the port is taken, or the address is not this machine's.
        """
        where = (_address_of(self.host), self.port + rank if self.port else 0)
        family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
        try:
            return socket.create_server(where, family=family, backlog=64)
        except OSError as error:
            raise OSError(
                error.errno,
                f"cannot listen for remote actors on {where[0]}:{where[1]} ({error.strerror}); "
                "name an address of this machine and a port that is free",
            ) from error


def listening(address: str, secret_file: str | Path, description: Mapping[str, Any]) -> Listening:
    """Check the settings of a run whose actors are remote.

    Args:
        address: ``HOST:PORT``; the host is an address or an interface, see :class:`Listening`.
        secret_file: see :func:`read_secret`.
        description: see :class:`Listening`.

    Raises:
        ValueError, OSError: as they say.
    """
    host, port = split_address(address)
    if not host or (_is_ip(host) and ipaddress.ip_address(host).is_unspecified):
        raise ValueError(
            f"the address for remote actors is {address!r}, which is every interface of this "
            "machine; name the one that actors come through, such as 127.0.0.1:29700"
        )
    return Listening(host, port, read_secret(secret_file), description)


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` (an IPv6 host in brackets).

    Raises:
        ValueError: it is something else.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"the address is {address!r}; write HOST:PORT with a port of 0..65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def find_learner(text: str) -> tuple[str, int] | Path:
    """Return where an actor looks for its learner rank: ``HOST:PORT``, or a run's ``*.json``.

    Raises:
        ValueError: it is neither.
    """
    return Path(text) if text.endswith(".json") else split_address(text)


def read_board(path: Path) -> tuple[str, int]:
    """Return host and port of the learner rank that wrote ``path``, see :meth:`Hub.write_board`.

    Raises:
        FileNotFoundError: it has not started yet.
        ValueError: the file names no address.
    """
    facts = json.loads(path.read_text())
    if not isinstance(facts, dict) or not isinstance(facts.get("listens"), str):
        raise ValueError(
            f"{path} does not say where a learner listens; give HOST:PORT, or RUN_DIR/actors/"
            "rank-R/remote.json of a run with topology=remote"
        )
    return split_address(facts["listens"])


def read_secret(path: str | Path) -> bytes:
    """Return the job's secret.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: others than its owner may read it.
        ValueError: it is too short to be one.
    """
    path = Path(path)
    make = f"make one with: (umask 077; openssl rand -hex 32 > {path})"
    if not path.is_file():
        raise FileNotFoundError(f"there is no secret in {path}; {make}")
    if path.stat().st_mode & 0o077:
        raise PermissionError(f"others may read the secret in {path}; chmod 600 {path}")
    secret = path.read_bytes().strip()
    if len(secret) < LEAST_SECRET:
        raise ValueError(
            f"the secret in {path} has {len(secret)} bytes; it needs {LEAST_SECRET}: {make}"
        )
    return secret


def _address_of(host: str) -> str:
    """Return the IPv4 address of the interface ``host``; ``host`` itself if it is no interface."""
    found = psutil.net_if_addrs().get(host)
    if found is None:
        return host
    addresses = [entry.address for entry in found if entry.family == socket.AF_INET]
    if not addresses:
        raise OSError(f"interface {host} has no IPv4 address to listen on; name another, or one")
    return addresses[0]


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
