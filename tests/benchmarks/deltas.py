"""Cost of reading a delta of a turn during sampling, by class of format, also in a long argument."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from runner.parsing.call_writer import WrittenCall, id_for, write_calls
from runner.parsing.events import Event, FinishedCall
from runner.parsing.harmony import CALLS, HarmonyStream
from runner.parsing.streaming import TurnStream
from runner.parsing.turn_format import CallFormat
from runner.parsing.turn_reader import TurnReader
from tests.benchmarks.figures import Figure, main, on_one_core
from tests.parsing.learnt_formats import CLASSES
from tests.parsing.written_turns import format_of

ROUND_COUNT = 7
REPEAT_COUNT = 5
LONG_CALL_CHARS = 64_000
FORMATS: tuple[str, ...] = tuple(CLASSES)
PROSE = "I think so, yes: 3 < 4, and f(x) = [x] {y}. " * 40
Begin: TypeAlias = Callable[[], TurnStream | HarmonyStream]
# Brackets, quotes and tags, as in files of code.
CODE = "def f(x):\n    return x < 3 and '<b>' or \"a\\b\"\n\tif not x: {1: [2, 3]}  # it's é </b>\n"


def measure() -> Iterator[Figure]:
    """Processor time for reading deltas of 1 to 6 characters, by class of format."""
    on_one_core()
    reader = TurnReader(format_of(CLASSES[FORMATS[0]]))
    yield _figure("a delta of prose", partial(TurnStream, reader), _cut(PROSE), calls=0)
    for name in FORMATS:
        reader = TurnReader(format_of(CLASSES[name]))
        form = reader.format.calls
        assert form is not None
        marks = reader.reasoning
        opening = "" if marks.opened_by_prompt else marks.open
        yield from _figures(name, form, partial(TurnStream, reader), opening, f"{marks.close}\n\n")
    closing = "<|end|><|start|>assistant"
    yield from _figures("harmony", CALLS, HarmonyStream, "<|channel|>analysis<|message|>", closing)


def _figures(name: str, form: CallFormat, begin: Begin, opening: str, closing: str) -> Iterator[Figure]:
    short, long = (_written(form, CODE * times) for times in (3, LONG_CALL_CHARS // len(CODE)))
    yield _figure(f"a delta of a thought and a call: {name}", begin, _cut(opening + PROSE + closing + short), calls=1)
    name = f"  of a call with {LONG_CALL_CHARS // 1000}k characters"
    yield _figure(name, begin, _cut(opening + closing + long), calls=1)


def _written(form: CallFormat, text: str) -> str:
    call_id = id_for(form, "write_file", 0) or "abcdef123"
    return write_calls(form, [WrittenCall("write_file", {"path": "a.py", "text": text}, call_id)])


def _figure(name: str, begin: Begin, deltas: Sequence[str], *, calls: int) -> Figure:
    def microseconds() -> float:
        began = time.thread_time()
        for _ in range(REPEAT_COUNT):
            _read(begin(), deltas)
        return (time.thread_time() - began) / REPEAT_COUNT / len(deltas) * 1e6

    read_calls = [event.call for event in _read(begin(), deltas) if isinstance(event, FinishedCall)]
    assert [call.error for call in read_calls] == [None] * calls
    return Figure(name, "us", tuple(microseconds() for _ in range(ROUND_COUNT)), under=5)


def _read(stream: TurnStream | HarmonyStream, deltas: Sequence[str]) -> list[Event]:
    return [event for delta in deltas for event in stream.feed(delta)] + stream.finish()


def _cut(text: str) -> list[str]:
    source, deltas, at = random.Random(0), list[str](), 0
    while at < len(text):
        deltas.append(text[at : at + source.randint(1, 6)])
        at += len(deltas[-1])
    return deltas


if __name__ == "__main__":
    main(measure)
