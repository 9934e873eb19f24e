"""Rows of a batch during sampling: many at once, each returned when it finishes."""

from __future__ import annotations

import dataclasses
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

import anyio
import anyio.lowlevel

from runner.concurrency.threads import soon_on_this_loop
from runner.engines.base import Engine, FinishReason, GenerationRequest, width_of
from runner.episode.sample import SampledTurn, sample
from runner.errors import EngineDead, EngineError, RequestRejected
from runner.options import Sampling
from runner.seeds import derive_seed
from runner.tokens.log import Source, TokenLog

__all__ = ["Row", "RowSetting", "RunningRows", "SampledRow"]


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt of a batch, with its own stop strings."""

    index: int
    prompt: array[int]
    """The prompt's token ids, shape [prompt], int32; at least one."""
    stop: tuple[str, ...] = ()
    """Strings that end the row, besides the strings for all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSetting:
    """The common settings of the rows of one batch."""

    engine: Engine
    name: str
    """The batch's name, in errors and logs."""
    sampling: Sampling
    """The sampling of the rows, every field set."""
    stop_ids: tuple[int, ...]
    context: int
    """Maximum number of ids of a prompt and its sample together."""
    seed: tuple[str | int, ...] | None
    """The base of each row's seed, combined with the row's index; None leaves the seeds to the engine."""
    stall_seconds: float | None
    """Seconds without a step of the engine after which an admitted row fails; None for no limit."""
    retries: int
    """Number of times that a row is sampled again after an engine's failure."""


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A row whose sampling has ended."""

    index: int
    log: TokenLog
    """The prompt and the sampled ids, with log-probabilities and weight versions."""
    start: int
    """The index of the first sampled id."""
    finish: FinishReason
    """The reason why the row ended; CONTEXT also if the prompt left no room for a single id."""
    stop: int | str | None = None
    """The stop id or stop string that ended the row; None without one."""
    text: str | None = None
    """The text before a stop string, if one ended the row; otherwise None."""


async def _sample_row(row: Row, setting: RowSetting) -> SampledRow:
    """Sample one row. If the engine fails, sample the row again, up to `RowSetting.retries` times.

    Raises:
        EngineError: the last try failed, the engine died, or the engine refuses the row.
    """
    room = setting.context - len(row.prompt)
    if room < 1:
        log = TokenLog()
        log.append_prompt(row.prompt, Source.PROMPT)
        return SampledRow(row.index, log, len(log), FinishReason.CONTEXT)
    request = _request(row, setting, room)
    for tried in range(setting.retries + 1):
        into = SampledTurn(TokenLog())
        await sample(
            into,
            setting.engine,
            request,
            new_ids=row.prompt,
            source=Source.PROMPT,
            tokenizer=setting.engine.tokenizer,
            stall_seconds=setting.stall_seconds,
        )
        if into.error is None:
            cut_short = into.finish is FinishReason.LENGTH and room < setting.sampling.max_tokens
            finish = FinishReason.CONTEXT if cut_short else into.finish
            return SampledRow(row.index, into.log, into.start, finish, into.stop, into.text)
        if tried == setting.retries or isinstance(into.error, EngineDead | RequestRejected):
            raise type(into.error)(f"row {row.index}: {into.error}") from into.error
    raise AssertionError("a row is tried at least once")


def _request(row: Row, setting: RowSetting, room: int) -> GenerationRequest:
    sampling = setting.sampling
    return GenerationRequest(
        name=f"{setting.name}/main/{row.index}",
        prompt=row.prompt,
        sampling=dataclasses.replace(
            sampling.shortened(min(sampling.max_tokens, room)),
            stop=tuple(dict.fromkeys((*sampling.stop, *row.stop))),
        ),
        stop_ids=setting.stop_ids,
        seed=None if setting.seed is None else derive_seed(*setting.seed, row.index),
        acts_on_deltas=bool(sampling.stop or row.stop),
    )


class RunningRows:
    """The rows of one batch while a separate task samples them. Iterating yields each row when it finishes.

    A row that fails permanently does not affect the other rows: its error is raised after the last of them. The other
    rows are cut only if nothing can be sampled any more.
    """

    def __init__(self, rows: Sequence[Row], setting: RowSetting) -> None:
        self.over = anyio.Event()
        """Set once sampling has ended and no request is open."""
        self._waiting = iter(rows)
        self._missing = len(rows)
        self._setting = setting
        # Only enough rows to keep the engine full have a task, so that ten thousand rows do not need a task each.
        self._width = min(len(rows), width_of(setting.engine))
        self._ready: deque[SampledRow] = deque()
        self._changed = anyio.Event()
        self._scope = anyio.CancelScope()
        self._failures: list[EngineError] = []
        self._fatal: Exception | None = None
        self._closed = False
        self._soon = soon_on_this_loop()

    async def run(self) -> None:
        """Sample all rows."""
        try:
            with self._scope:
                async with anyio.create_task_group() as workers:
                    for _ in range(self._width):
                        workers.start_soon(self._work)
        finally:
            self.over.set()
            self._notify()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SampledRow:
        """Return the next row that finishes.

        Raises:
            StopAsyncIteration: all rows were returned, or `aclose` was called.
            EngineError: rows failed, or the engine died; raised once, after the rows that finished.
            RuntimeError: rows were cut, since the block of the `Generation` was left.
        """
        await anyio.lowlevel.checkpoint_if_cancelled()
        while not self._ready:
            if self.over.is_set():
                raise self._ending()
            await self._changed.wait()
        self._missing -= 1
        return self._ready.popleft()

    async def aclose(self) -> None:
        """Cut pending rows, and return once no request is open."""
        self._closed = True
        self._scope.cancel()
        # No time limit is needed here, since leaving a stream has its own limit.
        with anyio.CancelScope(shield=True):
            await self.over.wait()

    def abandon(self) -> None:
        """Cut pending rows soon. This call is allowed in any thread, and after the event loop is closed."""
        if not self.over.is_set():
            with suppress(RuntimeError):  # the event loop is closed, so nothing is sampled any more
                self._soon(self._scope.cancel)

    async def _work(self) -> None:
        for row in self._waiting:
            try:
                self._ready.append(await _sample_row(row, self._setting))
            except EngineError as error:
                self._failures.append(error)
                if isinstance(error, EngineDead):
                    self._end(error)
            except (
                Exception
            ) as error:  # an error of any type is raised to the reader of the rows, not to the owner of the task group
                self._end(error)
            self._notify()

    def _end(self, error: Exception) -> None:
        self._fatal = self._fatal or error
        self._scope.cancel()

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    def _ending(self) -> Exception:
        """Return the exception that ends the iteration: StopAsyncIteration, or an error after the last row."""
        error = self._fatal or (self._failures[0] if self._failures else None)
        if error is not None and not self._closed:
            further = len(self._failures) - 1
            if self._fatal is None and further:
                error.add_note(f"{further} further rows failed; the first of them: {self._failures[1]}")
            self._closed = True
            return error
        if self._missing and not self._closed:
            return RuntimeError(
                f"{self._missing} rows were cut: the block of `async with Generation(...)` was left before their end."
            )
        return StopAsyncIteration()
