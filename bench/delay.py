"""Distance: a proxy before a server, in a process of its own, that gives each round trip a chosen length more."""

import contextlib
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

from psycopg import conninfo

_PROCESSES = multiprocessing.get_context("spawn")
_CHUNK = 64 * 1024


@contextlib.contextmanager
def serve(url: str, seconds: float) -> Iterator[str]:
    """Runs the proxy for as long as the block lasts, and yields the database's URL by way of it.

    Half of the time is spent in each direction. It suits a client that waits for each answer.
    """
    parts = conninfo.conninfo_to_dict(url)
    here, there = _PROCESSES.Pipe()
    arguments = (there, str(parts["host"]), int(parts.get("port") or 5432), seconds / 2)
    process = _PROCESSES.Process(target=_run, args=arguments, daemon=True)
    process.start()
    there.close()
    try:
        yield conninfo.make_conninfo(url, host="127.0.0.1", port=here.recv())
    finally:
        here.close()
        process.join()


def _run(caller: Connection, host: str, port: int, seconds: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, host, port, seconds), daemon=True).start()
    caller.send(listener.getsockname()[1])
    # The pipe ends when the process that wants the proxy has no more use for it, or is dead.
    with contextlib.suppress(EOFError):
        caller.recv()


def _accept(listener: socket.socket, host: str, port: int, seconds: float) -> None:
    while True:
        client, _ = listener.accept()
        server = socket.create_connection((host, port))
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=_carry, args=(source, target, seconds), daemon=True).start()


def _carry(source: socket.socket, target: socket.socket, seconds: float) -> None:
    with contextlib.suppress(OSError):
        while content := source.recv(_CHUNK):
            time.sleep(seconds)
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)
