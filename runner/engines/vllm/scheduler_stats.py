"""Counts of vLLM's schedulers at each step: open requests, cache use, tokens per second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import anyio

__all__ = ["Rate", "SchedulerStats"]

_WINDOW_SECONDS = 10.0
_BUCKET_SECONDS = 0.1  # a window has at most a hundred buckets, for any number of steps


class Rate:
    """Rate of events per second over the last ten seconds. `add` reports a number of events."""

    __slots__ = ("_buckets", "_clock")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[float, int]] = deque()  # (start, count) of each interval of `_BUCKET_SECONDS`

    def add(self, count: int) -> None:
        if not count:
            return
        now = self._clock()
        if self._buckets and now - self._buckets[-1][0] < _BUCKET_SECONDS:
            began, before = self._buckets[-1]
            self._buckets[-1] = (began, before + count)
        else:
            self._forget(now)
            self._buckets.append((now, count))

    def per_second(self) -> float:
        """Return the number of events in the last ten seconds, divided by the seconds since the first of them.

        The divisor is at least 1. The result is 0 if there was no event.
        """
        now = self._clock()
        self._forget(now)
        if not self._buckets:
            return 0.0
        return sum(count for _, count in self._buckets) / max(now - self._buckets[0][0], 1.0)

    def _forget(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= now - _WINDOW_SECONDS:
            self._buckets.popleft()


class SchedulerStats:
    """Counts of the schedulers of all engine cores. Unlike counts of vLLM's front end, they include leaked requests."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.prefix_queries = 0
        """Number of prompt ids that were looked up in the prefix cache since the start."""
        self.prefix_hits = 0
        """Number of prompt ids that were found in the prefix cache since the start."""
        self.prompt_tokens = 0
        """Number of prompt ids that were computed since the start; ids from the prefix cache are not counted."""
        self.steps = 0
        """Number of steps with computation since the start, of all engine cores together."""
        self.rate = Rate(clock)
        self.on_progress: Callable[[], None] = _nothing
        """Function that is called after each step with computation."""
        self._running: dict[int, int] = {}
        self._queued: dict[int, int] = {}
        self._usage: dict[int, float] = {}
        self._changed: anyio.Event | None = None

    @property
    def open(self) -> int:
        """Number of running and queued requests together."""
        return self.running + self.queued

    @property
    def running(self) -> int:
        return sum(self._running.values())

    @property
    def queued(self) -> int:
        """Number of queued requests inside the engine. They wait, for example, for cache or a grammar."""
        return sum(self._queued.values())

    @property
    def kv_usage(self) -> float | None:
        """Used fraction of the KV cache of the engine core with the fullest cache; None before the first step."""
        return max(self._usage.values(), default=None)

    def record(
        self, core: int, stats: Any, sampled: int = 0, prompt_tokens: int = 0, *, computed: bool | None = None
    ) -> None:
        """Record the statistics of an engine core's step.

        Args:
            core: number of the engine core.
            stats: vLLM's `SchedulerStats` of this core.
            sampled: number of ids that the step sampled.
            prompt_tokens: number of prompt ids that the step computed.
            computed: True if the step computed anything; by default, whether `sampled` or `prompt_tokens` is not 0.
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
        self.notify()

    def clear(self) -> None:
        """Set the numbers of open requests and the used fraction of the cache to 0, after all requests were ended.

        A scheduler reports its counts only at a step, and it has no step after the last request.
        """
        for counts in (self._running, self._queued):
            counts.update(dict.fromkeys(counts, 0))
        self._usage = dict.fromkeys(self._usage, 0.0)
        self.notify()

    def notify(self) -> None:
        """Wake the tasks in `wait_for_step`."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def wait_for_step(self) -> None:
        """Wait until a step has ended, or until the stream of a request is closed."""
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    async def until_idle(self) -> None:
        """Wait until the scheduler has no open request."""
        while self.open:
            await self.wait_for_step()

    def logger(self) -> type:
        """Return the class of a statistics logger for vLLM. Its objects record each step in these counts."""
        from vllm.v1.metrics.loggers import PrometheusStatLogger

        count = self

        # This is a subclass, since vLLM otherwise adds its Prometheus logger, which fills histograms for every token.
        class Logger(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is not typed
            def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None:
                self.engine_indexes = engine_indexes

            def record(self, scheduler_stats: Any, iteration_stats: Any, *rest: Any, **named: Any) -> None:
                if scheduler_stats is not None:
                    sampled = iteration_stats.num_generation_tokens if iteration_stats is not None else 0
                    read = _prompt_tokens(scheduler_stats, iteration_stats)
                    # An older vLLM reports 0 ids for a step that computes only a part of a prompt. So all its steps
                    # count as steps with computation.
                    moved = None if hasattr(scheduler_stats, "iteration_details") else True
                    count.record(named.get("engine_idx", 0), scheduler_stats, sampled, read, computed=moved)
                else:
                    count.notify()

            def log(self) -> None: ...
            def log_engine_initialized(self) -> None: ...
            def record_sleep_state(self, *rest: Any, **named: Any) -> None: ...
            def record_admission_rejection(self, reason: str) -> None: ...

        return Logger


def _nothing() -> None:
    """Do nothing."""


def _prompt_tokens(scheduler_stats: Any, iteration_stats: Any) -> int:
    """Return the number of prompt ids that a step computed, from vLLM's statistics."""
    details = getattr(scheduler_stats, "iteration_details", None)
    if details is not None:
        return int(details.num_ctx_tokens)
    # An older vLLM reports the ids of a prompt only once, in the step that samples the first id.
    stats = getattr(iteration_stats, "prompt_token_stats", None)
    return int(stats.computed) if stats is not None else 0
