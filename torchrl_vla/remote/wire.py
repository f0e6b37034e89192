"""Frames between a learner rank and a remote actor: JSON and tensors over TCP, never pickle.

A frame is two lengths, a JSON object, a safetensors payload and a tag. The two sides first prove to
each other that they know the job's secret (HMAC-SHA256 over two nonces) and derive a key for each
direction from it. From then on every frame carries a keyed BLAKE2b tag over its number and its
content, so that nobody between them can add, change, drop, repeat or turn round a frame unnoticed.
Frames are not encrypted: where images are a secret, send them through a tunnel.

Until the other side has proved itself, a frame has at most :data:`GREETING_BYTES` and no payload.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from tensordict import TensorDictBase

PROTOCOL = 2
GREETING_BYTES = 1024
TEXT_BYTES = 1 << 20
"""Longest JSON of an authenticated frame."""
_LENGTHS = struct.Struct(">IQ")
_NUMBER = struct.Struct(">Q")
_TAG_BYTES = 32
Key = tuple[str, ...]


class WireError(ConnectionError):
    """The other side sent what it should not have; the connection cannot be used any more."""


class RefusedError(RuntimeError):
    """The other side says why it will have nothing to do with this one; trying again is no use."""


class Channel:
    """One connection. For one thread at a time.

    Args:
        connection: connected TCP socket; closed with the channel.
        timeout: seconds without any progress after which the other side counts as gone.
    """

    def __init__(self, connection: socket.socket, timeout: float) -> None:
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        self._keys: tuple[bytes, bytes] | None = None  # of what is sent, of what is received
        self._sent = self._received = 0

    def wait_at_most(self, timeout: float) -> None:
        """Change the seconds without progress after which the other side counts as gone."""
        self._socket.settimeout(timeout)

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send one frame.

        Raises:
            OSError: the connection is gone, or nothing moved for the timeout.
        """
        text = json.dumps(message).encode()
        head = _LENGTHS.pack(len(text), len(payload)) + text
        parts = [head, payload]
        if self._keys is not None:
            parts.append(_tag(self._keys[0], self._sent, head, payload))
            self._sent += 1
        for part in parts:
            rest = memoryview(part)
            while rest:  # sendall() would limit the time of the whole frame
                rest = rest[self._socket.send(rest) :]

    def receive(self, limit: int = 0) -> tuple[dict[str, Any], bytes]:
        """Wait for one frame.

        Args:
            limit: most bytes of payload.

        Raises:
            WireError: it is too long, has a wrong tag, or is not JSON.
            RefusedError: the other side refuses this one.
            OSError: the connection is gone, or nothing moved for the timeout.
        """
        head = self._read(_LENGTHS.size)
        length, size = _LENGTHS.unpack(head)
        most = (GREETING_BYTES, 0) if self._keys is None else (TEXT_BYTES, limit)
        if length > most[0] or size > most[1]:
            raise WireError(f"a frame has {length} + {size} bytes; at most {most} are expected")
        text, payload = self._read(length), self._read(size)
        if self._keys is not None:
            tag = _tag(self._keys[1], self._received, head + text, payload)
            if not hmac.compare_digest(tag, self._read(_TAG_BYTES)):
                raise WireError("a frame has a wrong tag: it was changed, repeated or left out")
            self._received += 1
        try:
            message = json.loads(bytes(text))
        except ValueError as error:
            raise WireError(f"a frame is not JSON: {error}") from error
        if not isinstance(message, dict):
            raise WireError(f"a frame is a {type(message).__name__}, not a JSON object")
        if "refused" in message:
            raise RefusedError(str(message["refused"]))
        return message, payload

    def _read(self, size: int) -> bytearray:
        out = bytearray(size)
        rest = memoryview(out)
        while rest:
            count = self._socket.recv_into(rest)
            if not count:
                raise ConnectionResetError("the other side closed the connection")
            rest = rest[count:]
        return out

    def close(self) -> None:
        """Close the connection, also under a thread that waits in it. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is down already
        finally:
            self._socket.close()

    def challenge(self, secret: bytes) -> None:
        """Prove the secret to an actor that connected, after it has proved that it knows it.

        Raises:
            WireError: it does not know the secret, or speaks another protocol.
        """
        mine = secrets.token_bytes(32)
        self.send({"protocol": PROTOCOL, "nonce": mine.hex()})
        answer, _ = self.receive()
        theirs, proof = _bytes(answer, "nonce"), _bytes(answer, "proof")
        if not hmac.compare_digest(proof, _prove(secret, "actor", mine, theirs)):
            self.send({"refused": "the secret is not the one of this job"})
            raise WireError("it does not know the job's secret")
        self.send({"proof": _prove(secret, "learner", mine, theirs).hex()})
        self._take_keys(secret, mine, theirs, ("to actor", "to learner"))

    def answer(self, secret: bytes) -> None:
        """Prove the secret to a learner, and check that it knows it, too.

        Raises:
            RefusedError: the learner has another secret.
            WireError: it cannot prove that it knows the secret, or speaks another protocol.
        """
        greeting, _ = self.receive()
        if greeting.get("protocol") != PROTOCOL:
            raise WireError(f"it speaks protocol {greeting.get('protocol')}, not {PROTOCOL}")
        theirs, mine = _bytes(greeting, "nonce"), secrets.token_bytes(32)
        self.send({"nonce": mine.hex(), "proof": _prove(secret, "actor", theirs, mine).hex()})
        proof = _bytes(self.receive()[0], "proof")
        if not hmac.compare_digest(proof, _prove(secret, "learner", theirs, mine)):
            raise WireError("it does not know the job's secret")
        self._take_keys(secret, theirs, mine, ("to learner", "to actor"))

    def _take_keys(
        self, secret: bytes, learner: bytes, actor: bytes, uses: tuple[str, str]
    ) -> None:
        sending, receiving = (_prove(secret, use, learner, actor) for use in uses)
        self._keys = sending, receiving


def _prove(secret: bytes, use: str, learner: bytes, actor: bytes) -> bytes:
    text = b"torchrl_vla remote actors\0" + use.encode() + b"\0" + learner + actor
    return hmac.digest(secret, text, "sha256")


def _tag(key: bytes, number: int, head: bytes, payload: bytes) -> bytes:
    digest = hashlib.blake2b(_NUMBER.pack(number), key=key, digest_size=_TAG_BYTES)
    digest.update(head)
    digest.update(payload)
    return digest.digest()


def _bytes(message: Mapping[str, Any], name: str) -> bytes:
    try:
        value = bytes.fromhex(message[name])
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the greeting has no {name} of 32 bytes") from error
    if len(value) != 32:
        raise WireError(f"the greeting's {name} has {len(value)} bytes, not 32")
    return value


def pack(tensors: TensorDictBase) -> bytes:
    """Return the leaves of ``tensors`` as safetensors, with dotted names."""
    leaves = {}
    for key, leaf in tensors.items(True, True):
        path = (key,) if isinstance(key, str) else key
        leaves[".".join(path)] = leaf.detach().cpu().contiguous()
    return safetensors.torch.save(leaves)


def unpack(payload: bytes) -> dict[Key, torch.Tensor]:
    """Return what :func:`pack` packed, by key.

    Raises:
        WireError: it is no safetensors.
    """
    try:
        leaves = safetensors.torch.load(bytes(payload))
    except (SafetensorError, ValueError, KeyError) as error:
        raise WireError(f"a payload is no safetensors: {error}") from error
    return {tuple(name.split(".")): leaf for name, leaf in leaves.items()}
