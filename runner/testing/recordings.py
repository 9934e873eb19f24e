"""Recordings: what an engine said once, in a small file beside the test, said again without it."""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any, Self

from runner.engines.base import Delta, DeltaStream, Engine, Finish, FinishReason, GenerationRequest
from runner.engines.scripted.script import ModelCall, Reply
from runner.engines.wrapped_engine import WrappedEngine
from runner.errors import BadInput, BadOption, RequestRejected
from runner.testing.queued_engine import CheckedEngine
from runner.testing.recording_file import RERECORD_ADVICE, RecordedRequest, Recording, read_recording, write_recording
from runner.tokens.token_diff import first_mismatch, token_diff
from runner.tokens.tokenizer import Tokenizer

__all__ = ["RecordingEngine", "RecordingFixture", "ReplayEngine", "record", "replay"]

# Pytest shows the line of the test, where the fix belongs.
__tracebackhide__ = True


def record(engine: Engine) -> RecordingEngine:
    """An engine that passes everything on to `engine` and keeps it; `save(path)` writes the recording.

    Raises:
        BadOption: it is no engine.
    """
    if not isinstance(engine, Engine):
        raise BadOption(f"record({engine!r:.60}): give the engine to record.")
    return RecordingEngine(engine)


def replay(path: Path | str, *, tokenizer: Tokenizer | None = None, places: int = 256) -> ReplayEngine:
    """An engine that says what is recorded in a file, each turn to the prompt that it was said to.

    Args:
        path: the recording.
        tokenizer: the vocabulary of the model; by default it is loaded by the model's name, without the model.
        places: the number of requests that run at once.

    Raises:
        BadInput: the file is missing, damaged, edited by hand or of another version, or its vocabulary or template is
            not what it was; the message says what to do.
    """
    recording = read_recording(Path(path), tokenizer)
    return ReplayEngine(recording, places=places)


class RecordingEngine(WrappedEngine):
    """Another engine, whose requests and answers are kept."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._calls: list[RecordedRequest] = []

    @property
    def recorded(self) -> int:
        """How many requests were recorded."""
        return len(self._calls)

    def stream(self, request: GenerationRequest) -> DeltaStream:
        """The deltas of one request, kept as they are read."""
        return _RecordedStream(self.inner.stream(request), request, self._calls)

    def save(self, path: Path | str) -> None:
        """Write the recording: sorted, so that it does not depend on who was played first; one line a list of ids.

        Raises:
            BadInput: nothing was recorded, or the engine failed meanwhile.
        """
        if not self._calls:
            raise BadInput(f"{path}: nothing was asked of the engine, so there is nothing to record.")
        failed = [call.name for call in self._calls if call.finish in (None, FinishReason.ERROR)]
        if failed:
            raise BadInput(f"{path}: the engine failed at {', '.join(failed)}, so nothing is recorded.")
        write_recording(Path(path), self.inner, self._calls)


class ReplayEngine(CheckedEngine):
    """Says what is recorded; made by `replay`."""

    def __init__(self, recording: Recording, *, places: int) -> None:
        self._path = recording.path
        self._recorded = recording.turns
        self._left = list(recording.turns)
        super().__init__(
            tokenizer=recording.tokenizer,
            template=recording.template,
            stop_ids=recording.stop_ids,
            context=recording.context,
            places=places,
        )

    def leftovers(self) -> str:
        """What is recorded and nobody asked for."""
        if not self._left:
            return ""
        names = ", ".join(call.name for call in self._left[:8])
        return (
            f"{self._path}: {len(self._left)} of {len(self._recorded)} recorded turns were never asked for ({names}): "
            f"the recording is stale. If that is meant, {RERECORD_ADVICE}."
        )

    async def _answer(self, call: ModelCall) -> Reply:
        prompt = array("i", call.prompt_ids)
        name = call.request.name
        # By the prompt; by the name where several were sent the same one, such as the episodes of a group.
        same = [recorded for recorded in self._left if recorded.prompt == prompt]
        found = next((recorded for recorded in same if recorded.name == name), same[0] if same else None)
        if found is None:
            raise RequestRejected(self._differs(name, prompt))
        self._left.remove(found)
        return found.reply()

    def _differs(self, name: str, prompt: array[int]) -> str:
        again = f"If that is meant, {RERECORD_ADVICE}."
        nearest = next((recorded for recorded in self._left if recorded.name == name), None) or max(
            self._left, key=lambda recorded: first_mismatch(recorded.prompt, prompt), default=None
        )
        if nearest is None:
            return f"{name}: {self._path} has no further turn; all {len(self._recorded)} were said. {again}"
        at = first_mismatch(nearest.prompt, prompt)
        return (
            f"{name}: the prompt differs from {nearest.name} in {self._path} at id {at} "
            f"(of {len(nearest.prompt)} recorded, {len(prompt)} now). {again}\n"
            f"{token_diff(nearest.prompt, prompt, self.tokenizer)}"
        )


class _RecordedStream(DeltaStream):
    def __init__(self, inner: DeltaStream, request: GenerationRequest, calls: list[RecordedRequest]) -> None:
        self._inner = inner
        self._calls = calls
        self._call = RecordedRequest(request.name, array("i", request.prompt))

    @property
    def rest(self) -> list[Delta]:  # type: ignore[override]  # the inner stream's
        return self._inner.rest

    @property
    def finish(self) -> Finish | None:  # type: ignore[override]  # the inner stream's
        return self._inner.finish

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        self._calls.append(self._call)
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._inner.__aexit__(*raised)
        for delta in self._inner.rest:
            self._call.add(delta)
        self._call.end(self._inner.finish)

    async def __anext__(self) -> Delta:
        delta = await self._inner.__anext__()
        self._call.add(delta)
        return delta


# --- of a test


class RecordingFixture:
    """What the fixture `recorded_engine` gives out, and what becomes of it when the test has passed.

    Args:
        request: the request that pytest gives the fixture.
        record: "none", "once" or "rewrite".
    """

    def __init__(self, request: Any, *, record: str) -> None:
        self._request = request
        self._mode = record
        self._replayed: list[ReplayEngine] = []
        self._recorded: dict[Path, RecordingEngine | None] = {}

    def engine(self, source: Any, *, name: str, tokenizer: Tokenizer | None) -> Engine:
        """An engine that plays a recording back, or makes one.

        Args:
            source: what is recorded: an engine, or a function that gives one; by default `real_engine()`.
            name: tells the recordings of a test apart.
            tokenizer: the vocabulary, where it cannot be loaded by the model's name.
        """
        path = self._path(name)
        if path in self._recorded:
            raise BadOption(
                f"recorded_engine(): this test has the recording {path.name} already. Take the engine that was given, "
                "or name the second one: recorded_engine(name='judge')."
            )
        self._recorded[path] = None  # taken, also where what follows raises
        if self._mode == "none" or (self._mode == "once" and path.exists()):
            engine = replay(path, tokenizer=tokenizer)
            self._replayed.append(engine)
            return engine
        self._recorded[path] = recording = record(self._engine_of(source))
        return recording

    def save(self) -> None:
        """Write what was recorded."""
        for path, recording in self._recorded.items():
            if recording is not None:
                recording.save(path)

    def problems(self) -> list[str]:
        """What was played back and does not fit the test any more."""
        left = [engine.leftovers() for engine in self._replayed]
        return [problem for engine in self._replayed for problem in engine.problems] + [text for text in left if text]

    def _engine_of(self, source: Any) -> Engine:
        if source is None:
            source = self._request.getfixturevalue("real_engine")
        made = source if isinstance(source, Engine) else source() if callable(source) else source
        if not isinstance(made, Engine):
            raise BadOption(f"recorded_engine({made!r:.60}): give an engine to record, or a function that gives one.")
        return made

    def _path(self, name: str) -> Path:
        node = self._request.node
        parts = [Path(node.path).stem.removeprefix("test_"), node.name.removeprefix("test_"), *([name] if name else [])]
        safe = [re.sub(r"[^\w-]+", "-", part).strip("-") for part in parts]
        return Path(node.path).parent / "recordings" / f"{'.'.join(safe)}.json"
