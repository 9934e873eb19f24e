"""The batch interface, for trainers that use padded tensors: NeMo RL's generation methods on any engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any, Generic, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from runner import checked
from runner.engines.base import Engine, vocabulary_size
from runner.engines.sharing import ensure_running
from runner.engines.state import EngineState
from runner.errors import BadControl, BadOption
from runner.generation.config import (
    GenerationConfig,
    GenerationDatumSpec,
    GenerationOutputSpec,
    GenerationSettings,
    TextDatumSpec,
    TextOutputSpec,
)
from runner.generation.formats import Batch, PaddedBatch, TextBatch
from runner.generation.rows import RowSetting, RunningRows
from runner.options import Limits

__all__ = ["BatchResults", "Generation"]

T = TypeVar("T")


class BatchResults(Generic[T]):
    """The rows of one batch in the order in which they finish: (index, result) pairs, each result a batch of one row.

        async with generation.generate_async(batch) as results:
            async for index, result in results:
                ...

    Nothing is sampled before this object is entered or iterated. Leaving the block ends pending rows, and returns when
    no request is open. Without a block, as in `async for ... in generation.generate_async(batch)`, pending rows end as
    soon as nothing refers to this object, so at once after a `break` or an exception. While there is a reference, the
    iteration may be continued later. Leaving the block of the `Generation` ends all pending rows.

    Raises (from the iteration, after the last result):
        EngineError: rows failed permanently (the text has the index of the first one), or the engine died.
    """

    def __init__(self, start: Callable[[], RunningRows], batch: Batch[T]) -> None:
        self._start = start
        self._batch = batch
        self._rows: RunningRows | None = None
        self._closed = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, T]:
        if self._closed:
            raise StopAsyncIteration
        row = await anext(self._started())
        return row.index, self._batch.write([row])

    async def all(self) -> T:
        """Return one batch of the rows that were not read yet, sorted by index.

        Raises:
            EngineError: rows failed permanently, or the engine died.
            RuntimeError: the results were closed.
        """
        sampled = [row async for row in self._started()]
        return self._batch.write(sorted(sampled, key=lambda row: row.index))

    async def aclose(self) -> None:
        """End pending rows; no request is open afterwards. May be called twice."""
        self._closed = True
        if self._rows is not None:
            await self._rows.aclose()

    async def __aenter__(self) -> Self:
        self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # `break` leaves `async for` without closing the iterator. The sampling task has no reference to this object, so
        # this object is freed at once.
        rows: RunningRows | None = getattr(self, "_rows", None)
        if rows is not None:
            rows.abandon()

    def _started(self) -> RunningRows:
        if self._closed:
            raise RuntimeError("the results were closed before all rows were sampled: call generate() again")
        if self._rows is None:
            self._rows = self._start()
        return self._rows


class Generation:
    """Generation of batches on an engine.

        async with Generation(engine, {"max_new_tokens": 256, "_pad_token_id": 0}) as generation:
            output = await generation.generate({"input_ids": ids, "input_lengths": lengths})

    An engine that is already entered stays open; the block enters any other engine. Any number of batches may be
    generated at once. Leaving the block ends pending rows.

    Args:
        engine: the engine.
        config: the settings, such as a trainer's own dictionary; see `GenerationConfig`.
        stall_seconds: seconds without a step of the engine, for any request, after which an admitted row counts as a
            failure of the engine; None for no limit.
        retries: number of times that a row is sampled again after an engine's failure; a refused row is not sampled
            again.

    Raises (creating or entering):
        BadOption: the configuration is invalid; the message names the key.
    """

    def __init__(
        self,
        engine: Engine,
        config: GenerationConfig | Mapping[str, Any] | None = None,
        *,
        stall_seconds: float | None = 120.0,
        retries: int = 2,
    ) -> None:
        Limits(stall_seconds=stall_seconds)  # refuses invalid values
        checked.whole(f"retries={retries!r}", retries, least=0)
        self.engine = engine
        """The engine that samples."""
        self.settings = GenerationSettings.read(config if config is not None else {})
        """The configuration, checked, with its defaults."""
        self._stall_seconds = stall_seconds
        self._retries = retries
        self._batches = 0
        self._group: TaskGroup | None = None
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self._group is not None:
            raise RuntimeError("this Generation is entered already: enter it once, and share it")
        async with AsyncExitStack() as opened:
            await opened.enter_async_context(ensure_running(self.engine))
            self._check_stop_ids()
            self._group = await anyio.create_task_group().__aenter__()
            self._exit = opened.pop_all()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        assert self._group is not None
        group, self._group = self._group, None
        group.cancel_scope.cancel()
        try:
            # The task group receives no exception, since it would wrap an exception that leaves the block.
            await group.__aexit__(None, None, None)
        finally:
            await self._exit.__aexit__(*raised)

    # --- batches of padded arrays

    async def generate(
        self,
        batch: GenerationDatumSpec | Mapping[str, Any],
        greedy: bool = False,
        *,
        seed: int | None = None,
    ) -> GenerationOutputSpec:
        """Sample a continuation of every prompt of a batch.

        Args:
            batch: right-padded prompts, see `GenerationDatumSpec`.
            greedy: True to sample the most likely id each time, whatever the configuration is.
            seed: seed of this batch's samples, so that they do not depend on earlier batches. None derives the seed
                from the configuration's seed and the number of batches so far. If the configuration has no seed either,
                the engine chooses the seeds.

        Returns:
            Prompts and samples, see `GenerationOutputSpec`.

        Raises:
            BadBatch: the batch is invalid; the message names the row. Nothing was sampled.
            BadControl: the engine sleeps. If the engine is only paused, the call waits.
            EngineError: a row failed permanently; the message has its index. `generate_async` returns the other rows.
        """
        async with self.generate_async(batch, greedy, seed=seed) as results:
            return await results.all()

    def generate_async(
        self,
        batch: GenerationDatumSpec | Mapping[str, Any],
        greedy: bool = False,
        *,
        seed: int | None = None,
    ) -> BatchResults[GenerationOutputSpec]:
        """Sample like `generate`, and return each row when it finishes: `BatchResults` yields (index, result) pairs.

        Raises:
            BadBatch, BadControl: as in `generate`; this call raises them, before the iteration.
        """
        self._require_ready()
        vocabulary = vocabulary_size(self.engine)
        read = PaddedBatch.read(batch, pad_id=self.settings.pad_id, vocabulary=vocabulary)
        return self._results(read, greedy=greedy, seed=seed)

    # --- batches of texts

    async def generate_text(
        self,
        batch: TextDatumSpec | Mapping[str, Any],
        greedy: bool = False,
        *,
        seed: int | None = None,
    ) -> TextOutputSpec:
        """Sample a continuation of every text of a batch; arguments and errors as in `generate`.

        Returns:
            The sampled texts, see `TextOutputSpec`.
        """
        async with self.generate_text_async(batch, greedy, seed=seed) as results:
            return await results.all()

    def generate_text_async(
        self,
        batch: TextDatumSpec | Mapping[str, Any],
        greedy: bool = False,
        *,
        seed: int | None = None,
    ) -> BatchResults[TextOutputSpec]:
        """Sample like `generate_text`, and return each text when it finishes; see `generate_async`."""
        self._require_ready()
        return self._results(TextBatch.read(batch, self.engine.tokenizer), greedy=greedy, seed=seed)

    # --- between the trainer's steps

    async def prepare_for_generation(self, tags: Sequence[str] | None = None) -> bool:
        """Wake an engine that shares its accelerators with the trainer; quick if the engine is awake.

        Args:
            tags: the parts of the engine's memory to wake: "weights" before new weights are loaded, "kv_cache"
                afterwards; None for both.

        Returns:
            True; failures raise.
        """
        if self.settings.colocated:
            await self.engine.prepare_for_generation(tags)
        return True

    async def finish_generation(self, *, release_gpu: bool = True) -> bool:
        """Clear the prompt cache, and put a colocated engine to sleep.

        The entries of the cache were computed with the current weights, which may soon be replaced. Rows that are being
        sampled are cut by the sleep and sampled again once the engine is awake.

        Args:
            release_gpu: False keeps a colocated engine awake.

        Returns:
            True; failures raise.
        """
        await self.engine.finish_generation(level=0)
        if self.settings.colocated and release_gpu:
            await self.engine.finish_generation(level=1)
        return True

    # --- shared by all forms of a batch

    def _results(self, batch: Batch[T], *, greedy: bool, seed: int | None) -> BatchResults[T]:
        setting = self._setting(greedy=greedy, seed=seed)
        self._batches += 1

        def start() -> RunningRows:
            group = self._require_entered()
            rows = RunningRows(batch.rows, setting)
            group.start_soon(rows.run, name=setting.name)
            return rows

        return BatchResults(start, batch)

    def _setting(self, *, greedy: bool, seed: int | None) -> RowSetting:
        settings, engine = self.settings, self.engine
        return RowSetting(
            engine=engine,
            name=f"batch {self._batches}",
            sampling=settings.greedy if greedy else settings.sampling,
            stop_ids=tuple(dict.fromkeys((*engine.stop_ids, *settings.stop_token_ids))),
            context=engine.context if settings.context is None else min(settings.context, engine.context),
            seed=self._seed(greedy=greedy, seed=seed),
            stall_seconds=self._stall_seconds,
            retries=self._retries,
        )

    def _seed(self, *, greedy: bool, seed: int | None) -> tuple[str | int, ...] | None:
        if greedy:
            return None
        if seed is not None:
            return ("generation", "batch", seed)
        return None if self.settings.seed is None else ("generation", self.settings.seed, self._batches)

    def _require_entered(self) -> TaskGroup:
        if self._group is None:
            raise RuntimeError("write `async with Generation(engine, config) as generation:` and generate inside")
        return self._group

    def _require_ready(self) -> None:
        self._require_entered()
        if self.engine.state is EngineState.ASLEEP:
            raise BadControl("the engine is asleep: await prepare_for_generation(), or engine.wake(), first.")

    def _check_stop_ids(self) -> None:
        size = vocabulary_size(self.engine)
        for token_id in self.settings.stop_token_ids:
            if not 0 <= token_id < size:
                raise BadOption(
                    f"config['stop_token_ids']: {token_id} is not an id of the engine's vocabulary of {size}: it "
                    f"belongs to another tokenizer. Take the id from the tokenizer of the engine's model."
                )
