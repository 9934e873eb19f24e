"""Forced ids: a real engine samples given ids, with the model's own log-probabilities."""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Self, TypeAlias

from runner.engines.base import Delta, DeltaStream, Engine, Finish, GenerationRequest
from runner.engines.function.engine import TokenEngine
from runner.engines.scripted.script import ModelCall
from runner.engines.scripted.stream import RecordedCall
from runner.engines.sharing import ensure_running
from runner.engines.vllm.engine import VllmEngine
from runner.engines.wrapped_engine import WrappedEngine
from runner.errors import BadOption, RequestRejected

__all__ = ["FORCING", "ForcedEngine", "ForcedScript", "ForcedTurn", "force"]

_PROCESSOR: Final = "runner.engines.vllm.worker.forced_ids:ForcedIds"

FORCING: Final[Mapping[str, Any]] = {"logits_processors": [_PROCESSOR], "logprobs_mode": "raw_logprobs"}
"""Arguments with which a `VllmEngine` must be started to force ids: `VllmEngine(model, **FORCING)`."""

ForcedTurn: TypeAlias = Sequence[int] | None
"""The ids of one turn, including the stop id; None leaves the turn to the model."""

ForcedScript: TypeAlias = Sequence[ForcedTurn] | Mapping[str, Sequence[ForcedTurn]] | Callable[[ModelCall], ForcedTurn]
"""A list of turns, which every conversation reads from its beginning; a dict of such lists by agent; or a function of a
model call. With a dict, the model freely samples the turns of agents without a list."""


def force(engine: Engine, script: ForcedScript) -> ForcedEngine:
    """Wrap an engine so that it samples exactly the ids of `script`; give the result to a `Run`.

    async with Run(environment, force(engine, [[75, 2104, 2], [504, 2]])) as run: ...

    The ids of a turn end with a stop id; for a turn that is to be cut off, give at least `max_tokens` ids. Several
    wrappers may share an engine. Requests that do not go through a wrapper are not forced.

    Args:
        engine: a `VllmEngine` that is started with `FORCING`, or a `ScriptedEngine`.
        script: the ids of each turn.

    Raises:
        BadOption: the engine cannot force ids, or `script` is not a script.
    """
    return ForcedEngine(engine, script)


class ForcedEngine(WrappedEngine):
    """The engine that `force` returns. It forces ids, and delegates everything else to the wrapped engine.

    A turn that cannot be sampled according to the script is refused (`RequestRejected`), for one of these reasons:

    - The script has no ids for the turn, too few ids, or ids outside of the vocabulary.
    - Ids follow a stop id, or a stop id comes before `min_tokens`.
    - The turn is constrained.
    - The engine samples other ids.
    """

    def __init__(self, engine: Engine, script: ForcedScript) -> None:
        _refuse_engine(engine)
        super().__init__(engine)
        self.calls: list[RecordedCall] = []
        """All requests, forced or not, with their answers; `assert_exact` compares trajectories with them."""
        self._turn = _turn_reader(script)
        self._script_name = _script_name(script)
        self._running: Any = None

    async def __aenter__(self) -> Self:
        self._running = ensure_running(self.inner)
        await self._running.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> None:
        inside, self._running = self._running, None
        await inside.__aexit__(*raised)

    def stream(self, request: GenerationRequest) -> ForcedStream:
        return ForcedStream(self, request)

    def describe(self) -> dict[str, Any]:
        """The description of the wrapped engine, which run files store; the key `forced` has the script's name."""
        return {**self.inner.describe(), "forced": self._script_name}

    def _ids(self, request: GenerationRequest) -> list[int] | None:
        """The ids of a turn; None if the model samples the turn freely."""
        call = ModelCall(request, _turn_number(request), len(self.calls), self.tokenizer, 0)
        turn = self._turn(call)
        if turn is None:
            return None
        ids = _checked(turn, request.name, RequestRejected)
        # A model may have padding rows after its tokenizer's ids; these can be sampled as well.
        size = self.inner.vocabulary if isinstance(self.inner, VllmEngine) else self.tokenizer.size
        _refuse_ids(ids, request, size)
        return ids


class ForcedStream(DeltaStream):
    """The deltas of one request, checked against the forced ids."""

    def __init__(self, engine: ForcedEngine, request: GenerationRequest) -> None:
        self.rest: list[Delta] = []
        self.finish: Finish | None = None
        self._engine = engine
        self._request = request
        self._forced: list[int] = []
        self._sampled = array("i")
        self._logprobs = array("f")

    async def __aenter__(self) -> Self:
        request, ids = self._request, self._engine._ids(self._request)
        if ids is not None:
            self._forced = ids
            request = replace(request, extra={**request.extra, "force": ids})
        self._stream = self._engine.inner.stream(request)
        await self._stream.__aenter__()
        self._record = RecordedCall.of(request)
        self._record.sampled = self._sampled
        self._engine.calls.append(self._record)
        return self

    async def __aexit__(self, *raised: Any) -> None:
        try:
            await self._stream.__aexit__(*raised)
        finally:
            self.rest = self._stream.rest
            self.finish = self._record.finish = self._stream.finish
            for delta in self.rest:
                self._keep(delta)

    async def __anext__(self) -> Delta:
        delta = await self._stream.__anext__()
        begin = len(self._sampled)
        self._keep(delta)
        for sampled, wanted in zip(self._sampled[begin:], self._forced[begin:], strict=False):
            if sampled != wanted:
                raise RequestRejected(
                    f"{self._request.name}: the engine sampled {sampled}, not the forced {wanted}: this engine cannot "
                    "force ids. Use a VllmEngine(model, **FORCING), or a ScriptedEngine."
                )
        self.finish = delta.finish
        return delta

    def _keep(self, delta: Delta) -> None:
        self._sampled.extend(delta.token_ids)
        if delta.logprobs is not None:
            self._logprobs.extend(delta.logprobs)
            self._record.logprobs = self._logprobs


def _turn_reader(script: ForcedScript) -> Callable[[ModelCall], ForcedTurn]:
    """A function that returns the ids of a turn, or None if the model samples the turn freely."""
    if isinstance(script, Mapping):
        agents = {agent: _turns(turns) for agent, turns in script.items()}
        return lambda call: _turn_of_list(agents[call.agent], call) if call.agent in agents else None
    if isinstance(script, Sequence):
        return partial(_turn_of_list, _turns(script))
    if callable(script):
        return script
    raise _not_a_script(script)


def _turn_of_list(turns: Sequence[ForcedTurn], call: ModelCall) -> ForcedTurn:
    if call.turn < len(turns):
        return turns[call.turn]
    raise RequestRejected(
        f"{call.request.name}: force() has ids for {len(turns)} turns of this conversation, and this is turn number "
        f"{call.turn + 1}. Add its ids, or None to leave it to the model."
    )


def _script_name(script: ForcedScript) -> str:
    """A name of the script for the run's header: the name of a function, else a hash."""
    if callable(script):
        return str(getattr(script, "__qualname__", type(script).__qualname__))
    return hashlib.sha256(repr(script).encode()).hexdigest()[:16]


def _turns(turns: Any) -> list[ForcedTurn]:
    if not isinstance(turns, Sequence) or isinstance(turns, str | bytes):
        raise _not_a_script(turns)
    return [None if turn is None else _checked(turn, f"force(), turn {n}", BadOption) for n, turn in enumerate(turns)]


def _checked(ids: Any, name: str, error: type[BadOption | RequestRejected]) -> list[int]:
    try:
        return list(map(operator.index, ids))
    except TypeError:
        raise error(f"{name}: {ids!r:.60} is not a turn: give a list of token ids, or None to leave it free.") from None


def _not_a_script(script: object) -> BadOption:
    return BadOption(
        f"force({script!r:.60}): give a list of turns, each a list of token ids, a dict of such lists by agent, "
        "or a function of the turn."
    )


def _refuse_engine(engine: Engine) -> None:
    if isinstance(engine, TokenEngine):
        raise BadOption(
            "force(): a TokenEngine cannot force ids, because that needs a logits processor inside the engine: force "
            "them on a VllmEngine(model, **FORCING), or return the wanted ids from generate()."
        )
    if not isinstance(engine, VllmEngine):
        return  # a scripted engine can force ids; if another engine cannot, its first delta fails
    fix = "Start it with VllmEngine(model, **FORCING), from runner.testing."
    if _PROCESSOR not in (engine.given.get("logits_processors") or ()):
        raise BadOption(f"force(): this engine has no logits processor that forces ids. {fix}")
    mode = engine.given.get("logprobs_mode", "processed_logprobs")
    if mode != "raw_logprobs":
        raise BadOption(
            f"force(): with logprobs_mode={mode!r} a forced id does not have the model's log-probability, as it is the "
            f"only id that can be sampled. {fix}"
        )


def _turn_number(request: GenerationRequest) -> int:
    number = request.name.rpartition("/")[2]
    return int(number) if number.isdecimal() else 0


def _refuse_ids(ids: Sequence[int], request: GenerationRequest, vocabulary: int) -> None:
    """Raise RequestRejected if the engine would not sample exactly these ids."""
    name, longest = request.name, request.sampling.max_tokens
    if request.constraint is not None:
        raise RequestRejected(
            f"{name}: its ids cannot be forced, as it is constrained ({request.constraint.kind.value}). Play it with "
            "tool_choice='auto' or 'none' and without schema, regex and choice."
        )
    for token_id in ids:
        if not 0 <= token_id < vocabulary:
            raise RequestRejected(f"{name}: {token_id} cannot be forced: the model's ids are 0 to {vocabulary - 1}.")
    stops = {*request.stop_ids, *request.sampling.stop_ids}
    end = next((index for index, token_id in enumerate(ids, 1) if token_id in stops), None)
    if end is None and len(ids) < longest:
        cut = f", or play it with Sampling(max_tokens={len(ids)})" if ids else ""
        raise RequestRejected(
            f"{name}: {len(ids)} ids are forced, none is a stop id, and the turn continues to {longest} ids: add a "
            f"stop id ({', '.join(map(str, sorted(stops)))}){cut}."
        )
    least = request.sampling.min_tokens
    if end is not None and end <= least:
        raise RequestRejected(
            f"{name}: the stop id {ids[end - 1]} is forced after {end - 1} ids, but Sampling(min_tokens={least}) does "
            "not allow it there. Force more ids, or play without min_tokens."
        )
    if end is not None and end < len(ids):
        raise RequestRejected(
            f"{name}: the stop id {ids[end - 1]} ends the turn after {end} ids, so the {len(ids) - end} ids after it "
            "cannot be sampled. Remove them."
        )
