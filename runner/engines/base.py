"""The engine contract: token ids in, a stream of deltas out, and nothing left behind.

async with engine:                                   # start, stop
    async with engine.stream(request) as deltas:     # waits for a place; the request is gone on leaving the block
        async for delta in deltas: ...
    deltas.rest, deltas.finish                       # what was drained while leaving, also when an exception passed
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from anyio.lowlevel import current_token

from runner.concurrency.clocks import Standstill
from runner.engines.control import EngineControl, EngineState, PauseMode, WeightUpdate
from runner.errors import BadControl
from runner.options import Constraint, Sampling
from runner.tokens.log import VersionSpan
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer

__all__ = [
    "Delta",
    "DeltaStream",
    "Engine",
    "EngineStats",
    "Finish",
    "FinishReason",
    "GenerationRequest",
    "Session",
]


class FinishReason(enum.StrEnum):
    """Why a turn ended."""

    STOP = "stop"  # a stop id or a stop string; which one is in `stop`
    LENGTH = "length"  # `max_tokens`
    CONTEXT = "context"  # no room left in the context
    ABORT = "abort"  # cut by us: a limit, a cancellation
    REPETITION = "repetition"  # the engine saw the model repeat itself
    ERROR = "error"  # the engine failed


@dataclass(frozen=True, slots=True)
class Finish:
    """How a stream ended.

    Attributes:
        reason: stop and length are never merged; the engine says LENGTH, the caller tells CONTEXT from it by counting.
        stop: the stop id or stop string that caused it, or the text of an error.
        versions: weight versions of the ids of this stream, as spans that count from its first sampled id.
        cached_tokens: ids of the prompt that the engine's prefix cache held; None where it does not say.
    """

    reason: FinishReason
    stop: int | str | None = None
    versions: tuple[VersionSpan, ...] = ()
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """One or more ids as they were streamed; zero only where `finish` is set.

    Attributes:
        token_ids: in order of sampling.
        logprobs: log-probability of each id in nats, or None where the engine gives none.
        finish: set on the last delta of a stream.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    finish: Finish | None = None


@dataclass(slots=True)
class Session:
    """The engine-side state of one conversation's growing token sequence; made by `Engine.session()`.

    Attributes:
        late: its next request goes before any first one. An episode's very first request is not late.
        tokens: ids of the engine's cache that are kept for it: its length and its next `max_tokens`.
        closed: it holds no room any more.
    """

    late: bool = False
    tokens: int = 0
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One turn to be sampled.

    Attributes:
        name: names the turn in errors and logs, as "episode/agent/turn"; a scripted engine tells agents apart by it.
        prompt: every id the model is to see. Not copied by the caller: an engine that keeps it must copy it.
        sampling: every field set; its `stop` strings are not the engine's business.
        stop_ids: ids that end the turn; the one that did is the last id of the stream.
        seed: of this turn's random numbers; None leaves it to the engine.
        session: the conversation it belongs to; None for a single request, which counts as first.
        constraint: what may be sampled.
        acts_on_deltas: somebody acts on single deltas, so they come one id at a time.
        extra: for tests, such as {"force": ids}.
    """

    name: str
    prompt: Sequence[int]
    sampling: Sampling
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    session: Session | None = None
    constraint: Constraint | None = None
    acts_on_deltas: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What the engine is doing now, by its scheduler's own count after its last step, all its cores together.

    Attributes:
        open: requests that the engine has and has not finished.
        running: of those, requests that are being sampled.
        queued: of those, requests that wait inside the engine, for its cache or a grammar, or while it is paused.
        waiting: requests at our gate, which are not in the engine yet.
        first_waiting: of those, first requests of an episode.
        live_sessions: conversations that hold room in the cache.
        kv_usage: fraction of the KV cache in use, of the fullest core, or None.
        prefix_queries: ids of prompts that were looked up in the prefix cache since the engine started.
        prefix_hits: of those, ids that it held.
        sampled_tokens: ids sampled since the engine started, and read.
        tokens_per_second: ids sampled over the last ten seconds; 0 where nothing was, or nobody measures.
        weight_version: of the weights that sample now.
        state: running, paused, updating or asleep.
    """

    open: int
    running: int = 0
    queued: int = 0
    waiting: int = 0
    first_waiting: int = 0
    live_sessions: int = 0
    kv_usage: float | None = None
    prefix_queries: int = 0
    prefix_hits: int = 0
    sampled_tokens: int = 0
    tokens_per_second: float = 0.0
    weight_version: str = ""
    state: EngineState = EngineState.RUNNING

    @property
    def prefix_hit_rate(self) -> float | None:
        """Fraction of the prompts' ids that the prefix cache held; None before the first prompt."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None


class DeltaStream(ABC):
    """The deltas of one request; use it as `async with` around `async for`.

    Entering waits for a place in the engine and sends the request. Leaving, in whatever way, ends the request
    within a bounded shield and keeps what had been sampled: `rest` holds the deltas that were not read, `finish`
    how the stream ended (ABORT where it was cut).

    Raises (entering or iterating):
        RequestRejected: the engine refuses this request.
        EngineDead: the engine is gone.
    """

    rest: list[Delta]
    finish: Finish | None

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def __aiter__(self) -> Self:
        return self

    @abstractmethod
    async def __anext__(self) -> Delta: ...


class Engine(ABC):
    """Turns token ids into a stream of deltas.

    Attributes (set once it is entered):
        tokenizer: an instance of the runner's own.
        template: the chat template that belongs to the model.
        context: the most ids a prompt and what is sampled on it may have together.
        places: requests that run at once; further ones wait at the gate.
        stop_ids: ids that end a turn of this model (EOS, generation_config's list).
        running: it was entered and not left.
        loop: the event loop that it was entered on, the only one that it can be used on; None where it does not care.
        control: what a trainer may ask of it; None for an engine whose weights are not ours.
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    context: int
    places: int
    stop_ids: tuple[int, ...]
    running: bool = False
    loop: object = None
    control: EngineControl | None = None

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def stream(self, request: GenerationRequest) -> DeltaStream:
        """The deltas of one request; nothing happens before the block is entered."""

    def session(self, *, late: bool = False) -> Session:
        """A handle for one conversation; `close_session` gives its room back."""
        return Session(late=late)

    def close_session(self, session: Session) -> None:
        """Give the session's room back; twice is allowed."""
        session.closed = True

    @abstractmethod
    def stats(self) -> EngineStats: ...

    def is_alive(self) -> bool:
        """Whether it can answer, as far as is known without asking it; one that is paused or asleep can."""
        return self.running

    @abstractmethod
    async def health(self) -> None:
        """Return when the engine can answer.

        Raises:
            EngineDead: it cannot, with the cause.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a run's header keeps of the engine, as JSON: kind, model, versions, arguments, who stamps versions."""

    # --- for trainers

    @property
    def state(self) -> EngineState:
        """Running, paused, updating or asleep."""
        return self.control.state if self.control is not None else EngineState.RUNNING

    @property
    def weight_version(self) -> str:
        """Of the weights that sample now; "" for an engine whose weights are not ours."""
        return self.control.version if self.control is not None else ""

    @property
    def cuts(self) -> int:
        """How often turns that were being sampled were cut, for a pause or a sleep."""
        return self.control.cuts if self.control is not None else 0

    @property
    def standstill(self) -> Standstill:
        """Stops the clocks of whoever waits for this engine while it stands still."""
        return self.control.standstill if self.control is not None else Standstill()

    async def pause(self, mode: PauseMode | str = PauseMode.WAIT) -> None:
        """Stand still until `resume`: no further turn is begun, every clock of the episodes that wait stops.

        Args:
            mode: what becomes of the turns that are being sampled: `wait` for their end, `keep` them as they are, or
                `abort` them, which a run then samples anew.

        Raises:
            BadControl: it is paused already, or asleep.
        """
        await self._controlled().pause(mode)

    async def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            BadControl: it is not paused.
        """
        await self._controlled().resume()

    async def update_weights(
        self, source: Any, *, version: str | None = None, mode: PauseMode | str = PauseMode.KEEP
    ) -> WeightUpdate:
        """Exchange the weights under running episodes; every id says which version sampled it.

        Weights that do not fit are refused before the engine is touched. Every cached prompt is forgotten.

        Args:
            source: a folder of safetensors, a state dict, or a `WeightTransfer`; a scripted engine takes anything.
            version: names the new weights; by default they are counted: "1", "2", ...
            mode: what becomes of the turns that are being sampled; with `keep` one turn may be of two versions.

        Raises:
            BadWeights: they do not fit; names the tensor. The old ones stay.
            BadControl: the engine sleeps.
            EngineDead: it failed half way.
        """
        return await self._controlled().update_weights(source, version=version, mode=mode)

    @property
    def adapters(self) -> Mapping[str, Path | None]:
        """LoRA adapters that `Sampling(adapter=)` can name, and the folder of each; None where tensors were given."""
        adapters = self.control.adapters if self.control is not None else None
        return adapters.folders if adapters is not None else {}

    async def add_adapter(self, name: str, source: Any, *, config: Mapping[str, Any] | None = None) -> str:
        """Add a LoRA adapter, or a new version of one that is there; what does not fit changes nothing.

        Turns in flight go on with the version that they began with, later ones are sampled with the new one.

        Args:
            name: for `Sampling(adapter=name)`.
            source: a folder as PEFT saves it, or its tensors by name; copied.
            config: with tensors: what adapter_config.json would hold.

        Returns:
            What the weight versions of ids that it samples end with, after a "+": "poet@2".

        Raises:
            BadWeights: it does not fit; names the setting, the tensor or the file.
            BadOption: the name cannot be, or the engine was started without adapters.
            BadControl: the engine has no adapters, or sleeps.
        """
        return await self._controlled().add_adapter(name, source, config)

    async def remove_adapter(self, name: str) -> None:
        """Take a LoRA adapter away; turns in flight go on with it, no later one can ask for it.

        Raises:
            BadOption: there is none of that name.
            BadControl: the engine has no adapters, or sleeps.
        """
        await self._controlled().remove_adapter(name)

    async def sleep(self, level: int = 1) -> None:
        """Give memory up until `wake`: 1 keeps the weights elsewhere, 2 discards them. Running turns are cut.

        Raises:
            BadControl: it sleeps already.
        """
        await self._controlled().sleep(level)

    async def wake(self, tags: Sequence[str] | None = None) -> None:
        """Take memory back, all of it or "weights" or "kv_cache"; with the last part the engine goes on.

        Raises:
            BadControl: it does not sleep.
        """
        await self._controlled().wake(tags)

    async def prepare_for_generation(self, tags: Sequence[str] | None = None) -> None:
        """Be ready to sample, as NeMo RL's trainers ask before each step: wake, or nothing where it is awake."""
        if self.control is not None:
            await self._controlled().wake(tags, if_asleep=True)

    async def finish_generation(self, *, level: int = 1) -> None:
        """Make room for training, as NeMo RL's trainers ask after each step: sleep, or nothing where it sleeps.

        Args:
            level: of `sleep`; 0 only forgets the cached prompts, for an engine with devices of its own.
        """
        if level == 0:
            await self._controlled().reset_prefix_cache(unless_asleep=True)
        else:
            await self._controlled().sleep(level, unless_asleep=True)

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prompt; turns that are being sampled go on, and compute theirs again.

        Raises:
            BadControl: it sleeps.
        """
        await self._controlled().reset_prefix_cache()

    async def start_profile(self) -> None:
        """Start the engine's profiler."""
        await self._controlled().profile(on=True)

    async def stop_profile(self) -> None:
        """Stop the engine's profiler, which then writes what it saw."""
        await self._controlled().profile(on=False)

    async def devices(self) -> list[str]:
        """Where the model is, a name for each worker: "cpu", or a GPU's UUID; none for an engine without a model.

        Raises:
            BadControl: the engine cannot be controlled.
        """
        return await self._controlled().driver.devices()

    def _controlled(self) -> EngineControl:
        if self.control is None:
            raise BadControl(f"{type(self).__name__} cannot be controlled: its weights are not ours, or it never ran.")
        if self.loop is not None and self.loop != current_token():
            raise BadControl(f"{type(self).__name__} belongs to another event loop: control it where it was entered.")
        return self.control
