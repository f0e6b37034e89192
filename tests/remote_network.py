"""A network between learner and actor that tests can cut: a TCP relay on loopback."""

import contextlib
import socket
import threading
import time


class Relay:
    """Forwards connections to ``target``, and cuts them.

    Args:
        target: host and port.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.delay = 0.0
        """Seconds that every piece takes."""
        self.deaf = False
        """Whether what the learner says is lost on the way."""
        self.deaf_after: int | None = None
        """Become deaf when so many bytes have come from the actor."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(self.target)
                except OSError:
                    here.close()
                    continue
                self._pairs.append((here, there))
                above, below = self.readers()
                for way in ((here, there, True, above), (there, here, False, below)):
                    threading.Thread(target=self._forward, args=way, daemon=True).start()

    def readers(self) -> tuple[object, object]:
        """Return what :meth:`pass_on` gets for a new connection, for each direction."""
        return None, None

    def pass_on(self, data: bytes, reader: object, *, up: bool) -> None:
        """Look at what is on its way; ``up`` is from the actor to the learner."""

    def _forward(
        self, source: socket.socket, sink: socket.socket, up: bool, reader: object
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.pass_on(data, reader, up=up)
                time.sleep(self.delay)
                if up and self.deaf_after is not None:
                    self.deaf_after -= len(data)
                    self.deaf |= self.deaf_after <= 0
                if up or not self.deaf:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End every connection; new ones work."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()


def eventually(condition, seconds: float = 200.0) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def free_port() -> int:
    """Return a port that nobody has."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
