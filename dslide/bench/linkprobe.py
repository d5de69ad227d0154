"""One end of the link check: a TCP sender or receiver, run by path in a node's network (standard library
only).

    linkprobe.py receive ADDRESS PORT
    linkprobe.py send ADDRESS PORT START PLAN

PLAN is a JSON list of [mode, bytes, repetitions]; START is when to begin on the monotonic clock, which all
network namespaces of a machine share: so a message's time is the receiver's reading at its last byte minus
the sender's before its first. Both print a JSON list of readings, one list an item. Modes: "warm" (not
timed), "idle" (each message after 2 ms of silence), "stream" (all messages without a pause; one reading),
"echo" (the receiver answers one byte: the sender's differences are round trips).
"""

import contextlib
import json
import os
import socket
import struct
import sys
import time

_HEADER = struct.Struct("!8sqq")
_IDLE_SECONDS = 0.002
_CHUNK = 1 << 18


def _exactly(connection: socket.socket, count: int, buffer: memoryview) -> None:
    while count > 0:
        got = connection.recv_into(buffer[: min(count, len(buffer))])
        if got == 0:
            raise ConnectionError("the other end closed")
        count -= got


def receive(address: str, port: int) -> list[list[float]]:
    """Serves one sender until it closes. Returns the readings after the last byte of each message."""
    buffer = memoryview(bytearray(_CHUNK))
    results: list[list[float]] = []
    with socket.create_server((address, port)) as server:
        server.settimeout(20)
        connection, _ = server.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                try:
                    _exactly(connection, _HEADER.size, buffer)
                except ConnectionError:
                    return results
                name, size, repetitions = _HEADER.unpack(buffer[: _HEADER.size])
                mode = name.rstrip(b"\0").decode()
                connection.sendall(b"k")
                readings = []
                for _ in range(1 if mode == "stream" else repetitions):
                    _exactly(connection, size * repetitions if mode == "stream" else size, buffer)
                    readings.append(time.monotonic())
                    connection.sendall(b"k")
                results.append(readings)


def _connect(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection((address, port), timeout=20)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.005)


def send(address: str, port: int, start: float, plan: list[tuple[str, int, int]]) -> list[list[float]]:
    """Sends what the plan says. Returns the readings before the first byte of each message ("echo": round
    trips)."""
    results: list[list[float]] = []
    ack = memoryview(bytearray(1))
    payload = memoryview(bytes(max(size for _, size, _ in plan)))
    with _connect(address, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for mode, size, repetitions in plan:
            connection.sendall(_HEADER.pack(mode.encode(), size, repetitions))
            _exactly(connection, 1, ack)
            if start > 0:
                time.sleep(max(0.0, start - time.monotonic()))
            readings = []
            if mode == "stream":
                readings.append(time.monotonic())
                for _ in range(repetitions):
                    connection.sendall(payload[:size])
                _exactly(connection, 1, ack)
            else:
                for _ in range(repetitions):
                    time.sleep(_IDLE_SECONDS if mode == "idle" else 0.0)
                    began = time.monotonic()
                    connection.sendall(payload[:size])
                    _exactly(connection, 1, ack)
                    readings.append(time.monotonic() - began if mode == "echo" else began)
            results.append(readings)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    return results


if __name__ == "__main__":
    with contextlib.suppress(OSError):  # only root may; without it other work makes the link look late
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # the link is on trial, not the scheduler
    if sys.argv[1] == "receive":
        print(json.dumps(receive(sys.argv[2], int(sys.argv[3]))))
    else:
        print(json.dumps(send(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), json.loads(sys.argv[5]))))
