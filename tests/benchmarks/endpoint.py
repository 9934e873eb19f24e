"""Costs of an endpoint: time added to a turn, the event loop's time for a long history, and for a chunk.

Clients run in a process of their own, as agent programs do. So their processor time is not counted, but the latencies
contain it. Each load is also played without HTTP: the episodes hold the same conversations, and receive the deltas
during sampling.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
import anyio.lowlevel
from anyio.streams.text import TextReceiveStream

from runner import Concurrency, Conversation, Environment, Limits, Run, Task, ToolCall, Turn, reward
from runner.engines.scripted.script import Latency, ModelCall, Reply
from runner.episode.turn_settings import TurnSinks
from runner.messages import Message
from runner.runs.event_loop import collector_settings, on_event_loop
from runner.testing import ScriptedEngine
from runner.tools.external_tools import tools_of
from tests.benchmarks.figures import Figure, main

ROUND_COUNT = 3
SEQUENTIAL_TURN_COUNT = 200
"""Turns that are requested one after the other."""
STREAM_COUNT = 1_000
"""Streams that are open at once."""
SHORT_STREAM_IDS = 5
LONG_STREAM_IDS = 50
"""Ids of a long stream, one per chunk. A long stream costs more than a short one only by its additional chunks."""
TICK_SECONDS = 0.01
TICKS_PER_ID = 20
"""Ticks from one id to the next: a stream has five ids a second, so that 1,000 streams do not fill a core."""
START_SPREAD_SECONDS = 5.0
"""Seconds within which all streams begin."""
PROBE_SECONDS = 0.005
"""Seconds between two probes of the event loop."""
HISTORY_TURN_COUNT = 240
MEASURED_TURN_COUNT = 20
"""Turns that are measured at the beginning of a long history, and as many at its end."""
WORDS = "word " * 600

MESSAGES: list[Message] = [{"role": "system", "content": "s" * 20_000}, {"role": "user", "content": "Go."}]
BODY: dict[str, Any] = {"model": "any", "stream": True, "messages": MESSAGES}
TOOL = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
CLIENTS = Path(__file__).with_name("endpoint_clients.py")


def measure() -> Iterator[Figure]:
    """Time that an endpoint adds to a turn, and cost of a chunk."""
    alone = [(_median_alone(served=True), _median_alone(served=False)) for _ in range(ROUND_COUNT)]
    yield Figure("added to a turn, 20 kB: p50", "ms", tuple(with_it - bare for with_it, bare in alone), under=1)
    yield Figure("  the same turn without HTTP: p50", "ms", tuple(bare for _, bare in alone))
    rounds = [_Round() for _ in range(ROUND_COUNT)]
    for share in (0.5, 0.99):
        name = f"{STREAM_COUNT:,} streams, 20 kB: p{100 * share:.0f}"
        added = tuple(each.late(each.served, share) - each.late(each.bare, share) for each in rounds)
        yield Figure(f"added to a turn, {name}", "ms", added, under=10 if share > 0.9 else None)
        bare = tuple(each.late(each.bare, share) for each in rounds)
        yield Figure(f"  beside the engine's time without HTTP, {name}", "ms", bare)
    lags = tuple(each.served.round_of_the_loop for each in rounds)
    yield Figure("a round of the loop by processor time, 99th percentile", "ms", lags, under=10)
    yield Figure(
        f"of a core, {STREAM_COUNT:,} streams of 5 ids/s", "%", tuple(each.served.of_a_core for each in rounds)
    )
    yield Figure("  the same without HTTP", "%", tuple(each.bare.of_a_core for each in rounds))
    yield Figure("a chunk, of the server's process", "us", tuple(each.chunk for each in rounds), under=20)
    yield Figure("a request and its answer, of the server's process", "us", tuple(each.request for each in rounds))
    long = [_long_history() for _ in range(ROUND_COUNT)]
    name = f"the loop's time for {long[0].size / 1000:.0f} kB, {HISTORY_TURN_COUNT} turns"
    yield Figure(name, "ms", tuple(each.last for each in long))
    yield Figure("  of that added to the same turn without HTTP", "ms", tuple(map(_added, long)), under=3)
    yield Figure("  the loop's time at the first turns", "ms", tuple(each.first for each in long))


def played(rollout: Callable[[Any, Conversation], Any], engine: ScriptedEngine, episodes: int = 1) -> None:
    """Play episodes that run only this function."""

    class Load(Environment):
        limits = Limits(seconds=None)

        def tasks(self) -> list[Task]:
            return [Task(id=f"{number}", prompt=MESSAGES) for number in range(episodes)]

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


class _Load:
    """Episodes with one turn each. A client in another process requests each turn, or the episode generates it."""

    def __init__(self, count: int, ids: int, *, mode: str, served: bool) -> None:
        self.took: list[float] = []
        """Seconds of each turn, measured by the side that requested it."""
        self.beside: list[float] = []
        """Seconds of each turn without the engine's time, if turns are requested at once."""
        self.chunks = 0
        """Number of chunks that clients received."""
        self.processor = 0.0
        """Processor seconds of this process while turns were requested."""
        self.clock = 0.0
        """Seconds of that time by the clock."""
        self.round_of_the_loop = 0.0
        """Processor time of one round of the loop in milliseconds, 99th percentile: the largest delay that a round
        causes.
        """
        self._count, self._ids, self._mode, self._served = count, ids, mode, served
        self._urls: list[str] = []
        self._seconds_of: dict[str, float] = {}
        self._turn = anyio.Lock()

    def play(self) -> _Load:
        """Play all episodes."""
        self._all_there, self._asked = anyio.Event(), anyio.Event()
        at_once = self._mode == "at_once"
        latency = Latency(first=1, between=TICKS_PER_ID) if at_once else Latency()
        engine = ScriptedEngine(
            lambda _: Reply("x" * (self._ids - 1)),
            chunks=1,
            places=self._count,
            tick=TICK_SECONDS if at_once else 0.0,
            latency=latency,
            context=10**6,
        )
        played(self._rollout, engine, self._count)
        return self

    @property
    def of_a_core(self) -> float:
        """Share of a core that was used, in percent."""
        return 100 * self.processor / self.clock

    async def _rollout(self, episode: Any, conversation: Conversation) -> None:
        async with episode.serve(train=True) as endpoint:
            self._urls.append(endpoint.base_url)
            if len(self._urls) == self._count:
                self._began = time.process_time(), time.monotonic()
                self._all_there.set()
                if self._served:
                    await self._measured_by_clients()
            await self._all_there.wait()
            if self._served:
                await self._asked.wait()
                turns = [turn for thread in endpoint.threads for turn in thread.turns]
                self._note(
                    turns, [self._seconds_of[turn.handle.removeprefix("call_")] for turn in turns if self._seconds_of]
                )
            else:
                await self._ask(int(episode.id.partition("#")[0]), conversation)

    async def _measured_by_clients(self) -> None:
        async with (
            _clients(self._mode, self._urls, {"body": BODY, "spread": START_SPREAD_SECONDS}) as (lines, _),
            anyio.create_task_group() as group,
        ):
            group.start_soon(self._look_at_rounds)
            measured = json.loads(await anext(lines))
            self._measure()
            group.cancel_scope.cancel()
        if self._mode == "at_once":
            self._seconds_of = {handle.removeprefix("chatcmpl-"): took for handle, took, _ in measured}
            self.chunks = sum(chunks for _, _, chunks in measured)
        else:
            self.took = measured
        self._asked.set()

    async def _look_at_rounds(self) -> None:
        rounds: list[float] = []
        try:
            while True:
                await anyio.sleep(PROBE_SECONDS)
                began = time.thread_time()
                await anyio.lowlevel.checkpoint()
                rounds.append(1e3 * (time.thread_time() - began))
        finally:
            self.round_of_the_loop = sorted(rounds)[int(0.99 * (len(rounds) - 1))]

    async def _ask(self, number: int, conversation: Conversation) -> None:
        if self._mode == "at_once":
            await anyio.sleep(START_SPREAD_SECONDS * number / self._count)
            await self._generate(conversation)
        else:
            async with self._turn:
                await self._generate(conversation)
        self._measure()

    async def _generate(self, conversation: Conversation) -> None:
        began = time.perf_counter()
        # The turn is streamed, as for a client. The deltas are dropped.
        turn = await conversation._generate(TurnSinks(receive=lambda event: None), None, None)
        self._note([turn], [time.perf_counter() - began])

    def _note(self, turns: Sequence[Turn], took: Sequence[float]) -> None:
        """Record turns with their seconds as measured by the requesting side; record none that are already recorded."""
        self.took += took
        for turn, seconds in zip(turns, took, strict=False):
            timings = turn.timings
            self.beside.append(seconds - timings.queued - timings.first_token - timings.decode)

    def _measure(self) -> None:
        processor, clock = self._began
        self.processor, self.clock = time.process_time() - processor, time.monotonic() - clock


class _Round:
    """The same streams with HTTP and without, long ones and short ones."""

    def __init__(self) -> None:
        self.served, self.bare = (
            _Load(STREAM_COUNT, LONG_STREAM_IDS, mode="at_once", served=each).play() for each in (True, False)
        )
        served, bare = (
            _Load(STREAM_COUNT, SHORT_STREAM_IDS, mode="at_once", served=each).play() for each in (True, False)
        )
        long, short = self.served.processor - self.bare.processor, served.processor - bare.processor
        chunk = (long - short) / (self.served.chunks - served.chunks)
        self.chunk = 1e6 * chunk
        """Microseconds for a chunk."""
        self.request = 1e6 * (short - chunk * served.chunks) / STREAM_COUNT
        """Microseconds for a request, without its chunks."""

    def late(self, load: _Load, share: float) -> float:
        """Milliseconds within which this share of turns ended, without the engine's time."""
        return 1e3 * sorted(load.beside)[int(share * (len(load.beside) - 1))]


def _median_alone(*, served: bool) -> float:
    """Milliseconds of a turn while no other turn is open."""
    return 1e3 * statistics.median(
        _Load(SEQUENTIAL_TURN_COUNT, SHORT_STREAM_IDS, mode="one_by_one", served=served).play().took
    )


@dataclass
class _LongHistory:
    """Milliseconds of this thread for a request with a growing history, including its whole answer."""

    first: float = 0.0
    """Milliseconds at the beginning of the history."""
    last: float = 0.0
    """Milliseconds at the end of the history."""
    bare: float = 0.0
    """Milliseconds at the end of the history without HTTP."""
    size: int = 0
    """The bytes of the last body."""


def _added(found: _LongHistory) -> float:
    return found.last - found.bare


def _long_history() -> _LongHistory:
    found = _LongHistory()

    def say(call: ModelCall) -> Reply:
        return Reply("Let me see.", calls=[ToolCall("", "bash", {"command": f"ls {call.turn}"})])

    async def load(episode: Any, conversation: Conversation) -> None:
        stops = [2, 2 + MEASURED_TURN_COUNT, HISTORY_TURN_COUNT - MEASURED_TURN_COUNT, HISTORY_TURN_COUNT - 1]
        given = {
            "body": {"model": "any", "tools": [TOOL]},
            "turns": HISTORY_TURN_COUNT,
            "result": WORDS,
            "stops": stops,
        }
        async with (
            episode.serve() as endpoint,
            _clients("long_history", [endpoint.base_url], given) as (lines, process),
        ):
            spent = []
            for _ in stops:
                found.size = int(await anext(lines))
                spent.append(time.thread_time())
                await process.stdin.send(b"\n")
            await anext(lines)
        found.bare = await _long_without_http(episode)
        found.first = 1e3 * (spent[1] - spent[0]) / MEASURED_TURN_COUNT
        found.last = 1e3 * (spent[3] - spent[2]) / (MEASURED_TURN_COUNT - 1)

    played(load, ScriptedEngine(say, context=10**7))
    return found


async def _long_without_http(episode: Any) -> float:
    """Milliseconds of this thread for a late turn of the same conversation, held by the episode itself."""
    conversation, spent = episode.conversation("bare", prompt="Go.", tools=tools_of([TOOL])), 0.0
    for number in range(HISTORY_TURN_COUNT - 1):
        began = time.thread_time()
        turn = await conversation.generate()
        spent += time.thread_time() - began if number >= HISTORY_TURN_COUNT - MEASURED_TURN_COUNT else 0.0
        for made in turn.tool_calls:
            conversation.add({"role": "tool", "tool_call_id": made.id, "content": WORDS})
    return 1e3 * spent / (MEASURED_TURN_COUNT - 1)


@asynccontextmanager
async def _clients(
    mode: str, urls: Sequence[str], given: dict[str, Any]
) -> AsyncIterator[tuple[AsyncIterator[str], Any]]:
    """Clients in a process of their own: the lines that they print, and the process."""
    host, _, rest = urls[0].removeprefix("http://").partition(":")
    paths = [f"/{url.removeprefix('http://').partition('/')[2]}/chat/completions" for url in urls]
    settings = {**given, "address": host, "port": int(rest.partition("/")[0]), "paths": paths}
    process = await anyio.open_process([sys.executable, "-P", str(CLIENTS), mode], stdin=PIPE, stdout=PIPE, stderr=None)
    async with process:
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdin.send(json.dumps(settings).encode() + b"\n")
        yield _lines(TextReceiveStream(process.stdout)), process


async def _lines(parts: TextReceiveStream) -> AsyncIterator[str]:
    rest = ""
    async for part in parts:
        *lines, rest = (rest + part).split("\n")
        for line in lines:
            yield line


if __name__ == "__main__":
    main(measure)
