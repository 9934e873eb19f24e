"""The recordings of one test: where they lie, and whether they are played back or made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from runner.engines.base import Engine
from runner.errors import BadOption
from runner.testing.recording import RecordingEngine, ReplayEngine, record, replay
from runner.tokens.tokenizer import Tokenizer

__all__ = ["Cassette"]


class Cassette:
    """What the fixture `recorded_engine` gives out, and what becomes of it when the test has passed.

    Args:
        request: pytest's, of the test.
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

        Raises:
            BadInput: the recording cannot be played back.
        """
        path = self._path(name)
        if path in self._recorded:
            raise BadOption(
                f"recorded_engine(): this test has the recording {path.name} already. Take the engine that was given, "
                "or name the second one: recorded_engine(name='judge')."
            )
        self._recorded[path] = None
        if self._mode == "none" or (self._mode == "once" and path.exists()):
            engine = replay(path, tokenizer=tokenizer)
            self._replayed.append(engine)
            return engine
        self._recorded[path] = recording = record(self._source(source))
        return recording

    def save(self) -> None:
        """Write what was recorded.

        Raises:
            BadInput: there is nothing to write.
        """
        for path, recording in self._recorded.items():
            if recording is not None:
                recording.save(path)

    def problems(self) -> list[str]:
        """What was played back and does not fit the test any more."""
        left = [engine.leftovers() for engine in self._replayed]
        return [problem for engine in self._replayed for problem in engine.problems] + [text for text in left if text]

    def _source(self, source: Any) -> Engine:
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
