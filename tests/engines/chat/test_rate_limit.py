"""The adaptive limit: the number of simultaneous requests to a chat API, and paused clocks in the queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import anyio
import pytest
import trio.testing

from runner import Concurrency, Limits, Outcome, Run
from runner.engines.chat import engine as chat_engine
from runner.engines.chat.engine import ChatEngine
from runner.engines.chat.runtime import RateLimiter
from runner.engines.gate import AdmissionGate, Session
from runner.engines.http_retries import FailureKind, HttpFailure, RetryPolicy
from runner.runs.live_stats import StatsReader, in_words
from runner.testing import VirtualClock, cancel_everywhere
from tests.engines.chat.api import wanted
from tests.playing import Plain, assert_nothing_open, tasks


@dataclass
class Standing:
    """Stand-in for a server and the network, without any network, so that time can be virtual."""

    at_once: int = 1000
    """Number of requests that it accepts at once. Further requests get status 429."""
    retry_after: float | None = None
    thinks: float = 1.0
    """Seconds until an answer begins."""
    failures: deque[HttpFailure] = field(default_factory=deque)
    """Failures, one for each request, in order."""
    sent: list[float] = field(default_factory=list)
    """Times of the requests, in seconds."""
    open: int = 0
    most_open: int = 0
    url: str = "http://standing/v1"
    software: Mapping[str, str] = field(default_factory=dict)

    async def __aenter__(self) -> Standing:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def open_one(self) -> Answer:
        self.sent.append(anyio.current_time())
        if self.failures:
            raise self.failures.popleft()
        if self.open >= self.at_once:
            raise HttpFailure(FailureKind.BUSY, "HTTP 429: slow down", self.retry_after)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        answer = Answer(self)
        try:
            await anyio.sleep(self.thinks)
        except BaseException:
            await answer.close()
            raise
        return answer


class Answer:
    def __init__(self, server: Standing) -> None:
        self._server = server
        self._closed = False
        self._chunks: Iterator[Any] = iter(
            [
                {"model": "m", "choices": [{"index": 0, "delta": {"content": "Yes"}, "finish_reason": "stop"}]},
                {"model": "m", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
            ]
        )

    async def read(self) -> Any:
        return next(self._chunks, None)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._server.open -= 1


@contextmanager
def standing(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Iterator[Standing]:
    server = Standing(**settings)

    class Entered:
        """Stand-in for the engine's server."""

        url, software = server.url, server.software

        def __init__(self, *_: object, **__: object) -> None:
            pass

        async def __aenter__(self) -> Entered:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def probe(self) -> None:
            """Answer a health check: this server is always available."""

        async def open(self, body: Mapping[str, Any]) -> Answer:
            return await server.open_one()

    monkeypatch.setattr(chat_engine, "ChatServer", Entered)
    yield server


def played(engine: ChatEngine, count: int, **options: Any) -> tuple[list[Any], Run, float]:
    """Return the trajectories of a run in virtual time, the run, and its duration in seconds."""
    clock = VirtualClock()

    async def play() -> tuple[list[Any], Run, float]:
        began = anyio.current_time()
        async with Run(Plain, engine, **{"tasks": tasks(count), "breaker": 1, **options}) as run:
            got = [each async for each in run]
            assert_nothing_open(engine)
        return got, run, anyio.current_time() - began

    return clock.run(play)


# --- the limit itself


def limiter(places: int = 16, **policy: Any) -> tuple[RateLimiter, AdmissionGate]:
    gate = AdmissionGate(places, 1 << 40)
    return RateLimiter(gate, RetryPolicy(**policy)), gate


def in_trio(test: Callable[[], Any]) -> Any:
    return trio.run(test, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_limit_is_halved_once_for_all_that_were_sent_under_it() -> None:
    async def test() -> None:
        limits, gate = limiter(16)
        sent = [await limits.until_open() for _ in range(16)]
        for each in sent:
            limits.overloaded(each, 0.0)
        assert (limits.limit, gate.places, limits.throttled) == (8, 8, 16)
        for _ in range(5):
            limits.overloaded(await limits.until_open(), 0.0)
        assert limits.limit == 1  # the limit is never less

    in_trio(test)


def test_limit_grows_by_one_after_limit_answers() -> None:
    async def test() -> None:
        limits, _ = limiter(8)
        limits.overloaded(await limits.until_open(), 0.0)
        limits.overloaded(await limits.until_open(), 0.0)
        assert limits.limit == 2
        grown = []
        for _ in range(60):
            limits.succeeded()
            grown.append(limits.limit)
        assert grown[:3] == [2, 2, 3]
        assert grown[-1] == 8
        assert all(later - earlier in (0, 1) for earlier, later in pairwise(grown))

    in_trio(test)


def test_overloaded_server_is_not_asked_before_its_wait_is_over() -> None:
    async def test() -> None:
        limits, _ = limiter()
        limits.overloaded(await limits.until_open(), 100.0)
        async with anyio.create_task_group() as group:
            group.start_soon(limits.until_open)
            await anyio.sleep(50)
            limits.overloaded(0, 90.0)  # for a request that was sent before; it names a longer wait than the last one
        assert anyio.current_time() == pytest.approx(140.0)

    in_trio(test)


def test_rate_limit_without_retry_after_backs_off() -> None:
    async def test() -> None:
        limits, _ = limiter(first_seconds=1.0, longest_seconds=6.0)
        waits = []
        for _ in range(5):
            began = anyio.current_time()
            limits.overloaded(await limits.until_open(), None)
            await limits.until_open()
            waits.append(anyio.current_time() - began)
        assert waits == pytest.approx([1.0, 2.0, 4.0, 6.0, 6.0])
        limits.succeeded()
        began = anyio.current_time()
        limits.overloaded(await limits.until_open(), None)
        await limits.until_open()
        assert anyio.current_time() - began == pytest.approx(1.0)

    in_trio(test)


def test_gate_that_grows_again_admits_waiting_requests() -> None:
    async def test() -> None:
        gate = AdmissionGate(4, 1 << 40)
        gate.resize(1)
        inside: list[int] = []

        async def enter(number: int) -> None:
            await gate.enter(Session(), 1)
            inside.append(number)

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(enter, number)
            await anyio.wait_all_tasks_blocked()
            assert len(inside) == 1
            gate.resize(3)
            await anyio.wait_all_tasks_blocked()
            assert len(inside) == 3

    in_trio(test)


# --- in runs


@pytest.mark.parametrize("retry_after", [None, 20.0], ids=["without a word", "Retry-After"])
def test_run_finds_the_server_rate_without_failed_episodes(
    monkeypatch: pytest.MonkeyPatch, retry_after: float | None
) -> None:
    with standing(monkeypatch, at_once=4, retry_after=retry_after) as server:
        got, run, _ = played(ChatEngine("m", base_url="http://standing/v1", places=64), 100)
    assert {each.outcome for each in got} == {Outcome.COMPLETED}
    assert server.most_open == 4
    stats = run.engine.stats()
    assert stats.throttled > 0
    assert stats.places is not None
    assert stats.places < 64
    assert run.summary.as_dict()["throttled"] == stats.throttled
    assert run.summary.as_dict()["resent"] == stats.retried >= stats.throttled


def test_wait_for_the_rate_limit_stops_episode_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = HttpFailure(FailureKind.BUSY, "HTTP 429: slow down", 100.0)
    with standing(monkeypatch, failures=deque([busy, busy])) as server:
        got, _, seconds = played(
            ChatEngine("m", base_url="http://standing/v1"),
            4,
            limits=Limits(seconds=5, step_seconds=5),
            concurrency=Concurrency(episodes=4),
        )
    assert [each.outcome for each in got] == [Outcome.COMPLETED] * 4
    assert seconds > 100
    assert all(each.waited > 90 for each in got)
    assert server.sent[-1] - server.sent[0] > 100


def test_thinking_time_of_the_server_counts_as_episode_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with standing(monkeypatch, thinks=10.0):
        (trajectory,), _, _ = played(ChatEngine("m", base_url="http://standing/v1"), 1, limits=Limits(seconds=5))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TIME_LIMIT, "seconds")


def test_waiting_for_a_place_stops_the_clocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with standing(monkeypatch, thinks=3.0):
        got, _, seconds = played(
            ChatEngine("m", base_url="http://standing/v1", places=1),
            6,
            limits=Limits(seconds=4),
            concurrency=Concurrency(episodes=6),
        )
    assert [each.outcome for each in got] == [Outcome.COMPLETED] * 6
    assert seconds == pytest.approx(18.0, abs=0.5)


def test_a_retry_after_of_two_minutes_is_obeyed_to_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = HttpFailure(FailureKind.BUSY, "HTTP 429: slow down", 120.0)
    with standing(monkeypatch, failures=deque([busy])) as server:
        (trajectory,), _, _ = played(ChatEngine("m", base_url="http://standing/v1"), 1)
    assert trajectory.outcome is Outcome.COMPLETED
    first, second = server.sent
    assert second - first >= 120.0


def test_infinite_retry_after_does_not_delay_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    never = HttpFailure(FailureKind.BUSY, "HTTP 429: go away", float("inf"))
    with standing(monkeypatch, failures=deque([never])):
        got, _, seconds = played(ChatEngine("m", base_url="http://standing/v1", places=1), 3, retries=0)
    outcomes = sorted(each.outcome.value for each in got)
    assert outcomes == ["completed", "completed", "engine_error"]
    assert seconds < 60


def test_cancelled_run_leaves_no_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = HttpFailure(FailureKind.BUSY, "HTTP 429: slow down", 100.0)

    async def play() -> None:
        engine = ChatEngine("m", base_url="http://standing/v1", places=2)
        async with engine:
            async with Run(Plain, engine, tasks=tasks(8)) as run:
                await anyio.sleep(50)
                run.cancel()
            assert_nothing_open(engine)

    with standing(monkeypatch, failures=deque([busy] * 8)):
        VirtualClock().run(play)


def test_display_shows_that_a_server_limits_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> str:
        async with Run(Plain, ChatEngine("m", base_url="http://standing/v1", places=8), tasks=tasks(20)) as run:
            async for _ in run:
                pass
            return ", ".join(in_words(StatsReader().read(run)))

    with standing(monkeypatch, at_once=2):
        words = VirtualClock().run(play)
    assert "rate-limited" in words
    assert "requests at once" in words


def test_turn_cancelled_at_any_point_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> int:
        engine = ChatEngine("m", base_url="http://standing/v1", places=1)
        async with engine:

            async def scenario() -> None:
                server.failures.append(HttpFailure(FailureKind.BUSY, "HTTP 429: slow down", 2.0))
                async with engine.stream(wanted()) as stream:
                    async for _ in stream:
                        await anyio.sleep(1)

            def check() -> None:
                server.failures.clear()
                assert server.open == 0
                assert_nothing_open(engine)

            return await cancel_everywhere(scenario, check=check)

    with standing(monkeypatch) as server:
        assert in_trio(test) >= 3  # each before the first id, in a retry wait, and during reading
