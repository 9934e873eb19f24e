"""Every distinct call format of the corpus, read by us and by each suitable parser of vLLM's, and judged."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import orjson

from runner.parsing.call_writer import WrittenCall, id_for, write_calls
from runner.parsing.cut_points import CutPoints
from runner.parsing.learning.calls import learn_calls
from runner.parsing.learning.probe_renders import FormatProber, ProbeCall
from runner.parsing.turn_format import CallFormat, TurnFormat
from tests.conformance.corpus import Entry, control_tokens_of
from tests.conformance.peers.cases import PLAIN, Kind, Trial, schemas_of, written
from tests.conformance.peers.deviations import deviating
from tests.conformance.peers.groups import Group, grouped, turn_of
from tests.conformance.peers.judging import SLIGHT, CallsReader, judge
from tests.conformance.sweep import spread

__all__ = ["OURS", "RECORD", "CallRow", "key", "play", "play_all", "recorded", "write"]

RECORD: Final = Path(__file__).with_name("calls.jsonl")
OURS: Final = "ours"

Faults = Mapping[str, Mapping[str, str]]
"""Faults by kind and case: names of `Kind` and of `Fault`."""


@dataclass(frozen=True, slots=True)
class CallRow:
    """Results of one call format."""

    template: str
    """The template with this format that most models use."""
    templates: int
    """Number of templates with this format."""
    models: int
    """Number of models with these templates."""
    shown: str
    """One call in this format."""
    trials: Mapping[str, int]
    """Number of trials, by the name of their `Kind`."""
    readers: Mapping[str, Faults]
    """Faults of each reader: first our reader, then vLLM's parsers, beginning with the one with the fewest faults."""

    def wrong(self, reader: str, *, as_written: bool = False) -> int:
        """Number of faulty trials of a reader, either of text as templates write it or of deviating text."""
        faults = self.readers[reader]
        return sum(len(cases) for kind, cases in faults.items() if Kind[kind].is_written is as_written)

    def tried(self, *, as_written: bool) -> int:
        """Number of trials of this sort."""
        return sum(number for kind, number in self.trials.items() if Kind[kind].is_written is as_written)

    @property
    def best(self) -> str | None:
        """The parser of vLLM's with the fewest faults; None if none reads the format."""
        return next((reader for reader in self.readers if reader != OURS), None)

    def line(self) -> str:
        """Return the row as one line of the record."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def read(cls, line: str) -> Self:
        """Return the row in a line of the record."""
        return cls(**json.loads(line))


def recorded() -> list[CallRow]:
    """The recorded results."""
    return [CallRow.read(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]


def write(rows: Iterable[CallRow]) -> None:
    """Save the results."""
    RECORD.write_text("".join(f"{row.line()}\n" for row in rows), encoding="utf-8")


def play_all(turns: Sequence[tuple[Entry, TurnFormat]], processes: int = 2) -> list[CallRow]:
    """Results of every distinct format, in the order of their templates' names."""
    return spread(play, grouped(turns, key), processes)


def key(turn: TurnFormat) -> str:
    """Return a text that is equal for equal call formats, or "" if calls cannot be read."""
    return "" if turn.calls is None else orjson.dumps(turn.calls).decode()


def play(group: Group) -> CallRow:
    """Results of the format of one group of templates."""
    # Imported here, since this takes seconds, and pages are built from records without it.
    from tests.conformance.peers.readers import our_calls, vllm_calls

    entry, turn = group.entry, turn_of(group.entry)
    form = turn.calls
    assert form is not None, "only readable formats are played"
    tokens = tuple(control_tokens_of(entry))
    trials = [*written(_prober(entry, turn), form), *deviating(form, tokens)]
    plain = [_plain(form, said) for said in PLAIN]
    readers = {OURS: our_calls(turn, tokens), **_fit(form, plain, dict(vllm_calls(tokens)))}
    faults = {name: _faults(form, trials, reader) for name, reader in readers.items()}
    row = CallRow(
        template=entry.name,
        templates=group.templates,
        models=group.models,
        shown=plain[0].text,
        trials=dict(Counter(trial.kind.name for trial in trials)),
        readers=faults,
    )
    ordered = sorted(readers, key=lambda name: (name != OURS, row.wrong(name, as_written=True), row.wrong(name)))
    return dataclasses.replace(row, readers={name: faults[name] for name in ordered})


def _prober(entry: Entry, turn: TurnFormat) -> FormatProber:
    """Return a prober that has already found the context that the template needs around a call."""
    prober = FormatProber(entry.renderer(), CutPoints())
    if not turn.harmony:
        learn_calls(prober)
    return prober


def _plain(form: CallFormat, said: ProbeCall) -> Trial:
    text = write_calls(form, [WrittenCall(said.name, said.arguments, id_for(form, said.name, 0))])
    return Trial(Kind.ARGUMENTS, "", text, (said,), "", schemas_of([said]))


def _fit(form: CallFormat, plain: Sequence[Trial], readers: Mapping[str, CallsReader]) -> dict[str, CallsReader]:
    """Readers that read one plain call correctly; if none does, readers whose only faults are slight."""
    faults = {name: [judge(form, trial, reader) for trial in plain] for name, reader in readers.items()}
    right = {name: readers[name] for name, found in faults.items() if None in found}
    return right or {
        name: readers[name] for name, found in faults.items() if not SLIGHT.isdisjoint(filter(None, found))
    }


def _faults(form: CallFormat, trials: Sequence[Trial], reader: CallsReader) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for trial in trials:
        fault = judge(form, trial, reader)
        if fault is not None:
            found.setdefault(trial.kind.name, {})[trial.what] = fault.name
    return found
