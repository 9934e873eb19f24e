"""Recordings: the turns of a real engine in a small file next to the test, replayed without the engine."""

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

# Pytest leaves out the frames of this module and shows the line of the test, where the fix belongs.
__tracebackhide__ = True


def record(engine: Engine) -> RecordingEngine:
    """Wrap an engine so that its requests and turns are recorded; `save(path)` writes the recording.

    Raises:
        BadOption: `engine` is not an engine.
    """
    if not isinstance(engine, Engine):
        raise BadOption(f"record({engine!r:.60}): give the engine to record.")
    return RecordingEngine(engine)


def replay(path: Path | str, *, tokenizer: Tokenizer | None = None, places: int = 256) -> ReplayEngine:
    """An engine that replays a recording: a prompt gets the turn that was recorded for the same prompt.

    Args:
        path: the recording's file.
        tokenizer: the vocabulary of the model; by default it is loaded by the model's name, without the model.
        places: maximum number of concurrent requests.

    Raises:
        BadInput: the file is missing, damaged, edited by hand or of another version, or its vocabulary or template has
            changed; the message names the fix.
    """
    recording = read_recording(Path(path), tokenizer)
    return ReplayEngine(recording, places=places)


class RecordingEngine(WrappedEngine):
    """A wrapped engine whose requests and turns are recorded."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self._calls: list[RecordedRequest] = []

    @property
    def recorded(self) -> int:
        return len(self._calls)

    def stream(self, request: GenerationRequest) -> DeltaStream:
        return _RecordedStream(self.inner.stream(request), request, self._calls)

    def save(self, path: Path | str) -> None:
        """Write the recording, sorted so that it does not depend on the order of play, with one line per list of ids.

        Raises:
            BadInput: nothing was recorded, or the engine failed.
        """
        if not self._calls:
            raise BadInput(f"{path}: the engine had no request, so there is nothing to record: play on it first.")
        failed = [call.name for call in self._calls if call.finish in (None, FinishReason.ERROR)]
        if failed:
            raise BadInput(f"{path}: the engine failed at {', '.join(failed)}, so nothing is recorded: record again.")
        write_recording(Path(path), self.inner, self._calls)


class ReplayEngine(CheckedEngine):
    """An engine that replays a recording; created by `replay`."""

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
        """A message about recorded turns that were not used, or ""."""
        if not self._left:
            return ""
        names = ", ".join(call.name for call in self._left[:8])
        return (
            f"{self._path}: {len(self._left)} of {len(self._recorded)} recorded turns were not used ({names}): "
            f"the recording is stale. If that is intended, {RERECORD_ADVICE}."
        )

    async def _answer(self, call: ModelCall) -> Reply:
        prompt = array("i", call.prompt_ids)
        name = call.request.name
        # A turn is found by its prompt. If several turns have it, the one with the same name is preferred.
        same = [recorded for recorded in self._left if recorded.prompt == prompt]
        found = next((recorded for recorded in same if recorded.name == name), same[0] if same else None)
        if found is None:
            raise RequestRejected(self._differs(name, prompt))
        self._left.remove(found)
        return found.reply()

    def _differs(self, name: str, prompt: array[int]) -> str:
        again = f"If that is intended, {RERECORD_ADVICE}."
        nearest = next((recorded for recorded in self._left if recorded.name == name), None) or max(
            self._left, key=lambda recorded: first_mismatch(recorded.prompt, prompt), default=None
        )
        if nearest is None:
            return f"{name}: {self._path} has no further turn; all {len(self._recorded)} are used. {again}"
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
    def rest(self) -> list[Delta]:  # type: ignore[override]  # a property: the value is read from the inner stream
        return self._inner.rest

    @property
    def finish(self) -> Finish | None:  # type: ignore[override]  # a property like `rest`
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


# --- fixture


class RecordingFixture:
    """Implementation of the fixture `recorded_engine`: it replays or records engines, and saves the recordings.

    Args:
        request: the fixture `request` of pytest.
        record: "none" to replay recordings, "once" to record only missing ones, "rewrite" to record all again.
    """

    def __init__(self, request: Any, *, record: str) -> None:
        self._request = request
        self._mode = record
        self._replayed: list[ReplayEngine] = []
        self._recorded: dict[Path, RecordingEngine | None] = {}

    def engine(self, source: Any, *, name: str, tokenizer: Tokenizer | None) -> Engine:
        """An engine that replays a recording, or records one.

        Args:
            source: the engine to record, or a function that returns one; by default `real_engine()`.
            name: distinguishes several recordings of a test.
            tokenizer: the vocabulary, if it cannot be loaded by the model's name.

        Raises:
            BadOption: the test already has a recording of this name, or `source` is not an engine and does not return
                one.
            BadInput: the recording cannot be replayed.
        """
        path = self._path(name)
        if path in self._recorded:
            raise BadOption(
                f"recorded_engine(): this test already has the recording {path.name}. Use its engine, "
                "or name the second one: recorded_engine(name='judge')."
            )
        self._recorded[path] = None  # reserve the name, even if the following lines raise
        if self._mode == "none" or (self._mode == "once" and path.exists()):
            engine = replay(path, tokenizer=tokenizer)
            self._replayed.append(engine)
            return engine
        self._recorded[path] = recording = record(self._engine_of(source))
        return recording

    def save(self) -> None:
        for path, recording in self._recorded.items():
            if recording is not None:
                recording.save(path)

    def problems(self) -> list[str]:
        """Messages about requests that no recorded turn answers, and about recorded turns that were not used."""
        left = [engine.leftovers() for engine in self._replayed]
        return [problem for engine in self._replayed for problem in engine.problems] + [text for text in left if text]

    def _engine_of(self, source: Any) -> Engine:
        if source is None:
            source = self._request.getfixturevalue("real_engine")
        made = source if isinstance(source, Engine) else source() if callable(source) else source
        if not isinstance(made, Engine):
            raise BadOption(f"recorded_engine({made!r:.60}): give an engine to record, or a function that returns one.")
        return made

    def _path(self, name: str) -> Path:
        node = self._request.node
        parts = [Path(node.path).stem.removeprefix("test_"), node.name.removeprefix("test_"), *([name] if name else [])]
        safe = [re.sub(r"[^\w-]+", "-", part).strip("-") for part in parts]
        return Path(node.path).parent / "recordings" / f"{'.'.join(safe)}.json"
