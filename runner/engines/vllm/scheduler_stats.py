"""What vLLM's schedulers count at each step: open requests, the cache, tokens a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

__all__ = ["Rate", "SchedulerStats"]

_WINDOW_SECONDS = 10.0
_BUCKETS_PER_SECOND = 10  # so that a window has a hundred of them, however many steps a second there are


class Rate:
    """How many a second, over the last ten seconds; 0 once nothing came for as long."""

    __slots__ = ("_buckets", "_clock")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[float, int]] = deque()  # of tenths of a second, however many a step brings

    def add(self, count: int) -> None:
        """So many more, now."""
        if not count:
            return
        now = self._clock()
        if self._buckets and now - self._buckets[-1][0] < 1 / _BUCKETS_PER_SECOND:
            began, before = self._buckets[-1]
            self._buckets[-1] = (began, before + count)
        else:
            self._forget(now)
            self._buckets.append((now, count))

    def per_second(self) -> float:
        """Over the window, or over what of it has passed since the first."""
        now = self._clock()
        self._forget(now)
        if not self._buckets:
            return 0.0
        return sum(count for _, count in self._buckets) / max(now - self._buckets[0][0], 1.0)

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= now - _WINDOW_SECONDS:
            self._buckets.popleft()


class SchedulerStats:
    """The schedulers' own counts, of all engine cores; the front end's says 0 for a request that leaked in one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefix_queries = 0
        """Ids of prompts that were looked up in the prefix cache since the engine started."""
        self.prefix_hits = 0
        """Ids of prompts that the prefix cache held when they were looked up."""
        self.prompt_tokens = 0
        """Ids of prompts that were computed since the engine started, those that the prefix cache held left out."""
        self.steps = 0
        """The steps of all engine cores that computed something since the engine started."""
        self.rate = Rate(clock)
        """How many ids are sampled a second."""
        self.on_progress: Callable[[], None] = _nothing
        """Called after each step that computed something."""
        self._running: dict[int, int] = {}
        self._queued: dict[int, int] = {}
        self._usage: dict[int, float] = {}
        self._changed: anyio.Event | None = None

    @property
    def open(self) -> int:
        """Requests that the schedulers run or have waiting."""
        return self.running + self.queued

    @property
    def running(self) -> int:
        """Requests that are computed."""
        return sum(self._running.values())

    @property
    def queued(self) -> int:
        """Requests that wait inside the engine, for room in its cache or for a grammar."""
        return sum(self._queued.values())

    @property
    def kv_usage(self) -> float | None:
        """Fraction of the KV cache in use, of the fullest engine core."""
        return max(self._usage.values(), default=None)

    def record(
        self, core: int, stats: Any, sampled: int = 0, prompt_tokens: int = 0, *, computed: bool | None = None
    ) -> None:
        """Keep what an engine core's scheduler said after a step.

        Args:
            core: the number of the engine core.
            stats: its `SchedulerStats`.
            sampled: the ids that the step sampled.
            prompt_tokens: the ids of prompts that the step computed.
            computed: whether the step computed anything; by default by those numbers.
        """
        self.prompt_tokens += prompt_tokens
        if (sampled or prompt_tokens) if computed is None else computed:
            self.steps += 1
            self.on_progress()
        self._running[core] = stats.num_running_reqs
        self._queued[core] = stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0)
        self._usage[core] = stats.kv_cache_usage
        cache = stats.prefix_cache_stats
        if cache is not None:
            self.prefix_queries += cache.queries
            self.prefix_hits += cache.hits
        self.rate.add(sampled)
        self.tell()

    def clear(self) -> None:
        """Every request was ended: none is open or holds room, which a scheduler that does not step never says."""
        for counts in (self._running, self._queued):
            counts.update(dict.fromkeys(counts, 0))
        self._usage = dict.fromkeys(self._usage, 0.0)
        self.tell()

    def tell(self) -> None:
        """Wake whoever waits for news."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait_for_step(self) -> None:
        """Return at the next step, or when a request was left."""
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    async def until_idle(self) -> None:
        """Return when the scheduler has no open request."""
        while self.open:
            await self.wait_for_step()

    def logger(self) -> type:
        """The class that vLLM makes its statistics logger of."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        count = self

        # vLLM adds a Prometheus logger, which fills histograms for every token, unless one of this class is there.
        class Logger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not typed
            def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
                self.engine_indexes = engine_indexes

            def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
                if scheduler_stats is not None:
                    sampled = iteration_stats.num_generation_tokens if iteration_stats is not None else 0
                    read = _prompt_tokens(scheduler_stats, iteration_stats)
                    # An older vLLM says nothing of a step that computes a part of a prompt.
                    moved = None if hasattr(scheduler_stats, "iteration_details") else True
                    count.record(named.get("engine_idx", 0), scheduler_stats, sampled, read, computed=moved)
                else:
                    count.tell()

            def log(self) -> None: ...
            def log_engine_initialized(self) -> None: ...
            def record_sleep_state(self, *rest: Any, **named: Any) -> None: ...
            def record_admission_rejection(self, reason: str) -> None: ...

        return Logger


def _nothing() -> None:
    """Nobody is to be told."""


def _prompt_tokens(scheduler_stats: Any, iteration_stats: Any) -> int:
    """The ids of prompts that a step computed, as vLLM's statistics tell."""
    details = getattr(scheduler_stats, "iteration_details", None)
    if details is not None:
        return int(details.num_ctx_tokens)
    # An older vLLM says it of a whole prompt, with its first sampled id.
    stats = getattr(iteration_stats, "prompt_token_stats", None)
    return int(stats.computed) if stats is not None else 0
