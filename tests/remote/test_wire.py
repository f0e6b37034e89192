"""Frames and the handshake between two ends of a real TCP connection."""

import json
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from torchrl_vla.remote.settings import (
    find_learner,
    listening,
    read_board,
    read_secret,
    split_address,
)
from torchrl_vla.remote.wire import PROTOCOL, Channel, RefusedError, WireError, pack, unpack

SECRET = b"s" * 32


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return listener.accept()[0], one


@pytest.fixture
def ends():
    """The learner's and the actor's channel."""
    pair = [Channel(end, 10.0) for end in connected()]
    yield pair
    for channel in pair:
        channel.close()


def greet(ends, actor_secret: bytes = SECRET, learner_secret: bytes = SECRET):
    """Let both sides do their part; returns the exception of each, or ``None``."""
    with ThreadPoolExecutor() as pool:
        learner = pool.submit(ends[0].challenge, learner_secret)
        actor = pool.submit(ends[1].answer, actor_secret)
        return learner.exception(20), actor.exception(20)


def test_tensors_arrive_as_they_left(ends):
    assert greet(ends) == (None, None)
    rows = TensorDict(
        {
            "a": torch.arange(6, dtype=torch.int64).view(3, 2),
            "next": {"done": torch.tensor([True, False, True])},
            "half": torch.randn(3, 1).to(torch.bfloat16),
        },
        batch_size=[3],
    )
    for here, there in (ends, ends[::-1]):
        with ThreadPoolExecutor() as pool:
            sent = pool.submit(here.send, {"seq": 7}, pack(rows))
            message, payload = there.receive(1 << 16)
            sent.result(10)
        assert message == {"seq": 7}
        leaves = unpack(payload)
        assert set(leaves) == {("a",), ("next", "done"), ("half",)}
        for key, leaf in leaves.items():
            assert leaf.dtype == rows[key].dtype
            assert torch.equal(leaf, rows[key])


def test_a_wrong_secret_is_refused_on_both_sides(ends):
    learner, actor = greet(ends, actor_secret=b"w" * 32)
    assert isinstance(learner, WireError)
    assert "does not know the job's secret" in str(learner)
    assert isinstance(actor, RefusedError)
    assert "not the one of this job" in str(actor)


def test_an_actor_does_not_believe_a_learner_without_the_secret(ends):
    with ThreadPoolExecutor() as pool:
        actor = pool.submit(ends[1].answer, SECRET)
        ends[0].send({"protocol": PROTOCOL, "nonce": "00" * 32})
        ends[0].receive()
        ends[0].send({"proof": "00" * 32})
        with pytest.raises(WireError, match="does not know the job's secret"):
            actor.result(20)


def test_a_recorded_proof_is_worth_nothing_later(ends):
    heard = []
    receive = ends[0].receive
    ends[0].receive = lambda limit=0: heard.append(receive(limit)) or heard[-1]
    assert greet(ends) == (None, None)
    again = [Channel(end, 10.0) for end in connected()]
    with ThreadPoolExecutor() as pool:
        learner = pool.submit(again[0].challenge, SECRET)
        again[1].receive()
        again[1].send(heard[0][0])
        with pytest.raises(WireError, match="does not know"):
            learner.result(20)


def raw_frame(message: dict, payload: bytes = b"") -> bytes:
    text = json.dumps(message).encode()
    return struct.pack(">IQ", len(text), len(payload)) + text + payload


@pytest.mark.parametrize(
    "frame",
    [
        raw_frame({"seq": 1}) + bytes(32),  # no tag of ours
        struct.pack(">IQ", 1 << 30, 0),
        struct.pack(">IQ", 2, 1 << 60),
    ],
)
def test_a_foreign_frame_ends_the_connection(ends, frame: bytes):
    assert greet(ends) == (None, None)
    ends[1]._socket.sendall(frame)
    with pytest.raises(WireError):
        ends[0].receive(1 << 16)


def test_a_repeated_frame_ends_the_connection(ends):
    assert greet(ends) == (None, None)
    ends[1].send({"seq": 1})
    ends[1]._sent = 0  # the same number and so the same tag again
    ends[1].send({"seq": 1})
    assert ends[0].receive()[0] == {"seq": 1}
    with pytest.raises(WireError, match="wrong tag"):
        ends[0].receive()


@pytest.mark.parametrize(
    "greeting",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        raw_frame({"nonce": "zz", "proof": 3}),
        raw_frame({"n": "x" * 2000}),
    ],
)
def test_strangers_cost_nothing(greeting: bytes):
    here, there = connected()
    learner = Channel(here, 5.0)
    there.sendall(greeting)
    with pytest.raises(WireError):
        learner.challenge(SECRET)
    there.close()


def test_what_is_no_safetensors_is_refused():
    for payload in (b"", b"\x80\x04pickle", b"\xff" * 64):
        with pytest.raises(WireError, match="no safetensors"):
            unpack(payload)


def test_addresses_and_secrets(tmp_path: Path):
    assert split_address("[::1]:29700") == ("::1", 29700)
    for wrong in ("host", "host:", "host:x", "host:70000"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            split_address(wrong)
    secret = tmp_path / "secret"
    with pytest.raises(FileNotFoundError, match="openssl rand"):
        read_secret(secret)
    secret.write_text("short\n")
    with pytest.raises(PermissionError, match="chmod 600"):
        read_secret(secret)
    secret.chmod(0o600)
    with pytest.raises(ValueError, match="has 5 bytes; it needs 32"):
        read_secret(secret)
    secret.write_bytes(SECRET + b"\n")
    where = listening("127.0.0.1:0", secret, {})
    assert where.secret == SECRET
    assert "sss" not in repr(where)
    with listening("lo:0", secret, {}).socket(rank=3) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    for wrong in ("0.0.0.0:1", "[::]:1", ":1"):
        with pytest.raises(ValueError, match="every interface"):
            listening(wrong, secret, {})


def test_a_learner_is_found_by_address_or_by_its_file(tmp_path: Path):
    assert find_learner("n1:29700") == ("n1", 29700)
    board = tmp_path / "remote.json"
    assert find_learner(str(board)) == board
    with pytest.raises(FileNotFoundError):
        read_board(board)
    board.write_text('{"listens": "10.0.0.7:4711", "present": []}')
    assert read_board(board) == ("10.0.0.7", 4711)
    for wrong in ("[]", "{}", '{"listens": 5}', '{"listens"', '{"listens": "10.0.0.7"}'):
        board.write_text(wrong)
        with pytest.raises(ValueError, match=r"HOST:PORT|delimiter"):
            read_board(board)
