"""What an endpoint costs: the time that it adds to a turn, the loop's time for a long history, and a chunk of a stream.

Clients are a process of their own, as agent programs are: what they need of a core is not ours, but for the latencies,
which have it in them.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from subprocess import PIPE
from typing import Any

import anyio
import orjson

from runner import Concurrency, Conversation, Environment, Limits, Run, Task, ToolCall, reward
from runner.endpoint.answering import Door
from runner.endpoint.application import Application
from runner.engines.scripted.script import Latency, Reply
from runner.runs.process import collector_settings, on_event_loop
from runner.testing import ScriptedEngine
from tests.benchmarks.figures import Figure, main

ROUNDS = 3
STREAMS = 1_000
IDS = 20
"""Of each stream, a chunk each."""
TICK = 0.01
BETWEEN = 10
"""Ticks from one id to the next, so that a stream has ten a second."""
TURNS = 240
WORDS = "word " * 600
SPREAD = 2.0
"""Seconds over which streams are begun."""
BODY: dict[str, Any] = {
    "model": "any",
    "stream": True,
    "messages": [{"role": "system", "content": "s" * 20_000}, {"role": "user", "content": "Go."}],
}

TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}

CLIENTS = """
import asyncio, json, sys, time
host, port, spread = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
async def one(number, path, count, body):
    await asyncio.sleep(spread * number / count)
    reader, writer = await asyncio.open_connection(host, port)
    began = time.monotonic()
    head = f"POST {path} HTTP/1.1\\r\\nhost: {host}:{port}\\r\\ncontent-length: {len(body)}\\r\\n\\r\\n"
    writer.write(head.encode() + body)
    data = b""
    while b"[DONE]" not in data[-64:] and (part := await reader.read(65536)):
        data += part
    took = time.monotonic() - began
    writer.close()
    return [json.loads(data.partition(b"data: ")[2].splitlines()[0])["id"], took, data.count(b"data: ")]
async def main():
    given = json.load(sys.stdin)
    paths, body = given["paths"], json.dumps(given["body"]).encode()
    print(json.dumps(await asyncio.gather(*(one(n, path, len(paths), body) for n, path in enumerate(paths)))))
asyncio.run(main())
"""


def measure() -> Iterator[Figure]:
    """What an endpoint adds to a turn, and costs a chunk."""
    streamed = [_streamed(1 if alone else STREAMS) for alone in (True, False) for _ in range(ROUNDS)]
    alone, together = streamed[:ROUNDS], streamed[ROUNDS:]
    yield Figure("added to a turn, 20 kB, alone: p50", "ms", tuple(each["p50"] for each in alone), under=1)
    name = f"added to a turn, 20 kB, {STREAMS:,} streams"
    yield Figure(f"{name}: p50", "ms", tuple(each["p50"] for each in together))
    yield Figure(f"{name}: p99", "ms", tuple(each["p99"] for each in together), under=10)
    yield Figure("a chunk, of the server's process", "us", tuple(each["chunk"] for each in together), under=20)
    long = [_long_history() for _ in range(ROUNDS)]
    yield Figure(
        f"the loop's time for {long[0][1] / 1000:.0f} kB, {TURNS} turns", "ms", tuple(each for each, _ in long), under=3
    )


def played(rollout: Callable[[Any, Conversation], Any], engine: ScriptedEngine, episodes: int = 1) -> None:
    """Episodes that are nothing but this."""

    class Load(Environment):
        limits = Limits(seconds=None)

        def tasks(self) -> list[Task]:
            return [Task(id=f"{number}", prompt="") for number in range(episodes)]

        async def rollout(self, conversation: Conversation) -> None:
            await rollout(self.episode, conversation)

        @reward
        def none(self) -> float:
            return 0.0

    async def play() -> None:
        async with Run(Load(), engine, concurrency=Concurrency(episodes=episodes)) as run:
            with collector_settings():
                async for trajectory in run:
                    assert not trajectory.error, trajectory.error

    on_event_loop(play)


def _streamed(count: int) -> dict[str, float]:
    """Streams of clients in another process, an episode each: what is added to the engine's time, and a chunk."""
    served = _Load(count, by_clients=True)
    served.play()
    bare = _Load(count, by_clients=False)
    bare.play()
    handles = {turn.handle.removeprefix("call_"): turn for turn in served.turns}
    added = sorted(took - _engine_seconds(handles[handle.removeprefix("chatcmpl-")]) for handle, took, _ in served.told)
    return {
        "p50": 1e3 * statistics.median(added),
        "p99": 1e3 * added[int(0.99 * (len(added) - 1))],
        "chunk": 1e6 * (served.spent - bare.spent) / sum(each[2] for each in served.told),
    }


class _Load:
    """As many episodes, of which each is asked once: by a client in another process, or by itself."""

    def __init__(self, count: int, *, by_clients: bool) -> None:
        self.told: list[Any] = []
        """The id, the seconds and the chunks of each stream."""
        self.turns: list[Any] = []
        self.spent = 0.0
        """Seconds of this process, while they were asked."""
        self._count = count
        self._by_clients = by_clients
        self._urls: list[str] = []

    def play(self) -> None:
        self._asked = anyio.Event()
        engine = ScriptedEngine(
            lambda _: Reply("x" * (IDS - 1)),
            chunks=1,
            places=self._count,
            tick=TICK,
            latency=Latency(first=1, between=BETWEEN),
            context=10**6,
        )
        played(self._rollout, engine, self._count)

    async def _rollout(self, episode: Any, conversation: Conversation) -> None:
        async with episode.serve(train=True) as endpoint:
            self._urls.append(endpoint.base_url)
            if len(self._urls) == self._count:
                began = time.process_time()
                if self._by_clients:
                    self.told = await _clients(self._urls)
                    self.spent = time.process_time() - began
                self._asked.set()
            await self._asked.wait()
            if not self._by_clients:
                began = time.process_time()
                await anyio.sleep(SPREAD * int(episode.id.partition("#")[0]) / self._count)
                await episode.chat(BODY["messages"], train=True)
                self.spent = max(self.spent, time.process_time() - began)
            self.turns += [turn for thread in endpoint.threads for turn in thread.turns]


async def _clients(urls: list[str]) -> list[Any]:
    host, _, rest = urls[0].removeprefix("http://").partition(":")
    port = rest.partition("/")[0]
    paths = [f"/{url.removeprefix('http://').partition('/')[2]}/chat/completions" for url in urls]
    argv = [sys.executable, "-c", CLIENTS, host, port, str(SPREAD)]
    given = orjson.dumps({"paths": paths, "body": BODY})
    told: list[Any] = json.loads((await anyio.run_process(argv, input=given, stdout=PIPE, stderr=None)).stdout)
    return told


def _engine_seconds(turn: Any) -> float:
    return float(turn.timings.queued + turn.timings.first_token + turn.timings.decode)


def _long_history() -> tuple[float, int]:
    """The loop's milliseconds for the last request of a long history, its whole answer, and the size of its body."""
    found: list[tuple[float, int]] = []
    engine = ScriptedEngine(
        lambda call: Reply("Let me see.", calls=[ToolCall("", "bash", {"command": f"ls {call.turn}"})]), context=10**7
    )

    async def load(episode: Any, conversation: Conversation) -> None:
        async with episode.serve() as endpoint:
            door: Door = endpoint._door
            application = Application(["here"])
            key = application.open(door)
            messages: list[Any] = [{"role": "user", "content": "Go."}]
            for number in range(TURNS):
                body = orjson.dumps({"model": "any", "messages": messages, "tools": [TOOL]})
                gc.collect(0)
                began = time.thread_time()
                answer = await _asked(application, key, body)
                if number >= TURNS - 5:
                    found.append((1e3 * (time.thread_time() - began), len(body)))
                message = answer["choices"][0]["message"]
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": WORDS} for call in message["tool_calls"]
                ]

    played(load, engine)
    return statistics.median(each for each, _ in found), found[-1][1]


async def _asked(application: Application, key: str, body: bytes) -> Any:
    """Ask without a socket, so that nothing but the application is measured."""
    sent: list[bytes] = []
    gone = anyio.Event()
    bodies = iter([{"type": "http.request", "body": body}])

    async def receive() -> dict[str, Any]:
        message = next(bodies, None)
        if message is None:
            await gone.wait()
        return message or {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/e/{key}/v1/chat/completions",
        "headers": [(b"host", b"here")],
    }
    await application(scope, receive, send)
    return orjson.loads(b"".join(sent))


if __name__ == "__main__":
    main(measure)
