"""Sweep of the corpus: every template with every scenario after every past, and a verdict for each case."""

from __future__ import annotations

import enum
import multiprocessing
import random
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from runner.tokens.bridging.bridge import Bridge, Bridger, Unbridgeable
from runner.tokens.template import Renderer, TemplateRaised
from runner.tokens.tokenizer import VocabularyTokenizer
from tests.conformance.corpus import Entry, corpus
from tests.conformance.expected import Expected, NotApplicable, expected
from tests.conformance.scenarios import Case, Past, Scenario, case
from tests.conformance.vocabulary import END_OF_TEXT, host

__all__ = ["Judgement", "Outcome", "Verdict", "is_tool_capable", "judge", "play", "spread", "sweep"]


class Verdict(enum.StrEnum):
    """The verdict on a case."""

    EXACT = "exact"
    WRONG = "wrong"
    REFUSED = "refused"
    NO_EXACT_BRIDGE = "no exact bridge"
    NOT_APPLICABLE = "not applicable"


class Judgement(NamedTuple):
    """The verdict on a case, and its reason."""

    verdict: Verdict
    detail: str
    """The anchor of an exact bridge, the name of a refusal, the reason why the case is not applicable, or the fault."""
    refusal: str = ""
    """The property that the bridger named if it made no bridge."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case and its verdict."""

    template: str
    """The template's name."""
    family: str
    """The family of its models."""
    scenario: Scenario
    """The scenario."""
    past: Past
    """The earlier messages."""
    judgement: Judgement
    """The verdict and its reason."""
    tools: bool
    """True if the template is tool-capable."""

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict

    @property
    def detail(self) -> str:
        return self.judgement.detail


T = TypeVar("T")
R = TypeVar("R")


def sweep(entries: Sequence[Entry] | None = None, *, processes: int = 2) -> list[Outcome]:
    """Play all templates, or `entries`, in order."""
    return [outcome for outcomes in spread(play, entries or corpus(), processes) for outcome in outcomes]


def spread(play_one: Callable[[T], R], items: Sequence[T], processes: int) -> list[R]:
    """Return `play_one` of each item, in order, computed in this number of processes."""
    if processes == 1:
        return [play_one(item) for item in items]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(play_one, items, chunksize=max(1, len(items) // (processes * 16))))


def play(entry: Entry) -> list[Outcome]:
    """Play all cases of one template with one bridger on the host vocabulary, beginning with the simple pasts."""
    capable = is_tool_capable(entry)
    cases = [
        case(scenario, past, tools=capable)
        for past in Past
        for scenario in Scenario
        if capable or not (scenario.needs_tools or past.has_tools())
    ]
    judgements = judge(cases, entry.renderer(), host(), END_OF_TEXT)
    return [
        Outcome(entry.name, entry.family, made.scenario, made.past, judgement, capable)
        for made, judgement in zip(cases, judgements, strict=True)
    ]


def judge(
    cases: Sequence[Case], renderer: Renderer, vocabulary: VocabularyTokenizer, end_of_text: str
) -> list[Judgement]:
    """Return the verdict on each case, with one bridger for all cases in this order."""
    truths: list[Expected | NotApplicable] = []
    for made in cases:
        try:
            truths.append(expected(made, renderer, end_of_text))
        except NotApplicable as why:
            truths.append(why)
    names = {truth.stop for truth in truths if isinstance(truth, Expected) and truth.stop} | {end_of_text}
    stops = [token_id for name in sorted(names) if (token_id := vocabulary.token_id(name)) is not None]
    bridger = Bridger(vocabulary, renderer, stops)
    return [_judged(made, truth, bridger, vocabulary) for made, truth in zip(cases, truths, strict=True)]


def is_tool_capable(entry: Entry) -> bool:
    """True if a render with tools shows a call's argument and then its result."""
    made = case(Scenario.TOOL_RESULT, Past.SHORT)
    try:
        text = entry.renderer().render([*made.history, *made.new], tools=list(made.tools))
    except TemplateRaised:
        return False
    call, result = text.find(made.last_word), text.find(made.new[0]["content"].split(" ", 1)[0])
    return 0 <= call < result


def _judged(
    made: Case, truth: Expected | NotApplicable, bridger: Bridger, vocabulary: VocabularyTokenizer
) -> Judgement:
    if isinstance(truth, NotApplicable):
        return _not_applicable(made, truth, bridger, vocabulary)
    stop = vocabulary.token_id(truth.stop) if truth.stop else None
    if truth.stop and stop is None:
        return Judgement(Verdict.NOT_APPLICABLE, "the vocabulary lacks the stop")
    said = vocabulary.encode(truth.said)
    anchor = ""
    for sampled in (said, respelled(said, vocabulary)):
        ids = [*sampled, *([stop] if stop is not None else [])]
        try:
            bridge = bridger.bridge(list(truth.history), list(made.new), list(made.tools), sampled=ids, stop=stop)
        except Unbridgeable as refusal:
            return Judgement(Verdict.REFUSED, refusal.property.value, refusal.property.value)
        fault = _fault(truth, bridge, vocabulary)
        if fault:
            return Judgement(Verdict.WRONG, fault)
        anchor = bridge.junction.anchor.value
    return Judgement(Verdict.EXACT, anchor)


def _not_applicable(made: Case, why: NotApplicable, bridger: Bridger, vocabulary: VocabularyTokenizer) -> Judgement:
    """Return the verdict for a case without a tail in the template's renders, in which any bridge is wrong."""
    if not why.must_refuse:
        return Judgement(Verdict.NOT_APPLICABLE, str(why))
    sampled = vocabulary.encode("Some words")
    try:
        bridge = bridger.bridge(list(made.history), list(made.new), list(made.tools), sampled=sampled, stop=None)
    except Unbridgeable as refusal:
        return Judgement(Verdict.NO_EXACT_BRIDGE, str(why), refusal.property.value)
    return Judgement(Verdict.WRONG, f"{why}, got {vocabulary.decode(bridge.ids)!r}")


def _fault(truth: Expected, bridge: Bridge, vocabulary: VocabularyTokenizer) -> str:
    """Return the fault of a bridge, or ""."""
    ids = vocabulary.encode(truth.stop + truth.text)[1 if truth.stop else 0 :]
    # SentencePiece writes a space after each control token, so only its own decoding of the ids can be compared.
    text = truth.text if vocabulary.pieces is not None else vocabulary.decode(ids)
    got = vocabulary.decode(bridge.ids)
    if unicodedata.normalize("NFC", got) != unicodedata.normalize("NFC", text):
        return f"expected {text!r}, got {got!r}"
    if ids != bridge.ids:
        return f"expected {ids}, got {bridge.ids}"
    if bridge.junction.inserted != len(bridge.ids):
        return f"the junction counts {bridge.junction.inserted} ids of {len(bridge.ids)}"
    return ""


def respelled(ids: Sequence[int], vocabulary: VocabularyTokenizer) -> list[int]:
    """Return the same text in other ids: every third token that can be split is split into two."""
    if vocabulary.pieces is None:
        return list(ids)
    source = random.Random(len(ids))
    found: list[int] = []
    for token_id in ids:
        halves = list(_halves(token_id, vocabulary)) if source.random() < 0.3 else []
        found += source.choice(halves) if halves else [token_id]
    return found


def _halves(token_id: int, vocabulary: VocabularyTokenizer) -> Iterable[tuple[int, int]]:
    if token_id in vocabulary.special_ids:
        return
    pieces, ids = vocabulary.pieces, _ids_by_piece(vocabulary)
    assert pieces is not None
    piece = pieces[token_id]
    for at in range(1, len(piece)):
        if piece[:at] in ids and piece[at:] in ids:
            yield ids[piece[:at]], ids[piece[at:]]


_BY_PIECE: dict[str, dict[bytes, int]] = {}


def _ids_by_piece(vocabulary: VocabularyTokenizer) -> dict[bytes, int]:
    if vocabulary.fingerprint not in _BY_PIECE:
        assert vocabulary.pieces is not None
        _BY_PIECE[vocabulary.fingerprint] = {piece: index for index, piece in enumerate(vocabulary.pieces)}
    return _BY_PIECE[vocabulary.fingerprint]
