"""Clients of an endpoint in a process of their own, so that their processor time is not the server's.

`python endpoint_clients.py MODE` reads one JSON object from stdin. It prints a line of JSON at each step, and continues
after a further line on stdin. It uses only the standard library, and parses little of the answers.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from typing import Any


def post(path: str, host: str, body: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class _Stream(asyncio.Protocol):
    """One stream on a connection of its own, whose content is hardly parsed."""

    def __init__(self, request: bytes) -> None:
        self.over = asyncio.get_running_loop().create_future()
        self.took = 0.0
        self.chunks = 0
        self.begin = b""
        self._request = request
        self._end = b""
        self._began = 0.0

    def connection_made(self, transport: Any) -> None:
        self._began = time.monotonic()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks += data.count(b"data: ")
        if len(self.begin) < 1000:
            self.begin += data
        self._end = self._end[-64:] + data[-64:]
        if b"[DONE]" in self._end and not self.over.done():
            self.took = time.monotonic() - self._began
            self.over.set_result(None)


async def _stream(given: Any, number: int, body: bytes) -> tuple[str, float, int]:
    """Return the id of the answer, the seconds that it took, and the number of chunks."""
    paths, address, port = given["paths"], given["address"], given["port"]
    await asyncio.sleep(given["spread"] * number / len(paths))
    request = post(paths[number], f"{address}:{port}", body)
    transport, stream = await asyncio.get_running_loop().create_connection(lambda: _Stream(request), address, port)
    await stream.over
    transport.close()
    return json.loads(stream.begin.partition(b"data: ")[2].splitlines()[0])["id"], stream.took, stream.chunks


async def at_once(given: Any) -> None:
    """Read all streams at once. They begin one after the other, over some seconds."""
    body = json.dumps(given["body"]).encode()
    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(_stream(given, number, body)) for number in range(len(given["paths"]))]
    print(json.dumps([each.result() for each in streams]), flush=True)


def one_by_one(given: Any) -> None:
    """Read one stream after the other, on one connection."""
    body, took = json.dumps(given["body"]).encode(), list[float]()
    with _connected(given) as connection:
        for path in given["paths"]:
            request = post(path, f"{given['address']}:{given['port']}", body)
            began = time.perf_counter()
            connection.sendall(request)
            data = b""
            while not data.endswith(b"[DONE]\n\n\r\n0\r\n\r\n"):
                data += connection.recv(65536)
            took.append(time.perf_counter() - began)
    print(json.dumps(took), flush=True)


def long_history(given: Any) -> None:
    """Play a loop with a tool: the history grows. Before the requests in `stops` it waits for a line on stdin."""
    messages: list[Any] = [{"role": "user", "content": "Go."}]
    (path,) = given["paths"]
    with _connected(given) as connection:
        for number in range(given["turns"]):
            body = json.dumps({**given["body"], "messages": messages}).encode()
            if number in given["stops"]:
                print(len(body), flush=True)
                sys.stdin.readline()
            connection.sendall(post(path, f"{given['address']}:{given['port']}", body))
            message = json.loads(_whole(connection))["choices"][0]["message"]
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": given["result"]}
                for call in message["tool_calls"]
            ]
    print("over", flush=True)


def _connected(given: Any) -> socket.socket:
    connection = socket.create_connection((given["address"], given["port"]))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _whole(connection: socket.socket) -> bytes:
    """Read an answer whose length is in its header."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
    while len(body) < length:
        body += connection.recv(65536)
    return body


def main() -> None:
    mode, given = sys.argv[1], json.loads(sys.stdin.readline())
    if mode == "at_once":
        asyncio.run(at_once(given))
    else:
        {"one_by_one": one_by_one, "long_history": long_history}[mode](given)


if __name__ == "__main__":
    main()
