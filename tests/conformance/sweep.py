"""Plays the corpus: every template through every scenario after every past, and a verdict for each."""

from __future__ import annotations

import enum
import multiprocessing
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.tokens.bridge import Bridge, Bridger, Unbridgeable
from runner.tokens.junction import Anchor
from runner.tokens.template import TemplateRaised
from runner.tokens.tokenizer import VocabularyTokenizer
from tests.conformance.corpus import VARIABLES, Entry, corpus
from tests.conformance.expected import Expected, NotApplicable, expected
from tests.conformance.scenarios import Case, Past, Scenario, case
from tests.conformance.vocabulary import host

__all__ = ["Outcome", "Verdict", "play", "sweep"]


class Verdict(enum.StrEnum):
    """What became of a case."""

    EXACT = "exact"
    WRONG = "wrong"
    REFUSED = "refused"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case's verdict.

    Attributes:
        template: its name.
        family: of its models.
        scenario: what happened.
        past: what came before.
        verdict: what became of it.
        detail: the anchor of an exact bridge, the refusal's name, why it is not applicable, or what is wrong.
        tools: the template is tool-capable.
    """

    template: str
    family: str
    scenario: Scenario
    past: Past
    verdict: Verdict
    detail: str
    tools: bool


END_OF_TEXT = VARIABLES["eos_token"]


def sweep(entries: Sequence[Entry] | None = None, *, processes: int = 2) -> list[Outcome]:
    """Plays all templates, or `entries`, in order."""
    chosen = corpus() if entries is None else entries
    if processes == 1:
        return [outcome for entry in chosen for outcome in play(entry)]
    host()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return [outcome for outcomes in pool.imap(play, chosen, chunksize=8) for outcome in outcomes]


def play(entry: Entry) -> list[Outcome]:
    """All cases of one template with one bridger, the simple pasts first."""
    vocabulary = host()
    renderer = entry.renderer()
    capable = is_tool_capable(entry)
    bridger: Bridger | None = None
    outcomes: list[Outcome] = []

    def add(made: Case, verdict: Verdict, detail: str) -> None:
        outcomes.append(Outcome(entry.name, entry.family, made.scenario, made.past, verdict, detail, capable))

    cases = [
        case(scenario, past, 0)
        for past in Past
        for scenario in Scenario
        if capable or not (scenario.needs_tools or past.has_tools())
    ]
    truths: list[tuple[Case, Expected | NotApplicable]] = []
    for made in cases:
        try:
            truths.append((made, expected(made, renderer, END_OF_TEXT)))
        except NotApplicable as why:
            truths.append((made, why))
    stops = {truth.stop for _, truth in truths if isinstance(truth, Expected) and truth.stop} | {END_OF_TEXT}
    bridger = Bridger(
        vocabulary, renderer, [token for stop in stops if (token := vocabulary.token_id(stop)) is not None]
    )
    for made, truth in truths:
        add(made, *_verdict(made, truth, bridger, vocabulary))
    return outcomes


def is_tool_capable(entry: Entry) -> bool:
    """A call's argument and its result are seen in a render with tools, in that order."""
    made = case(Scenario.TOOL_RESULT, Past.SHORT, 0)
    try:
        text = entry.renderer().render([*made.history, *made.new], tools=made.tools)
    except TemplateRaised:
        return False
    call, result = text.find(made.last_word), text.find(made.new[0]["content"].split(" ", 1)[0])
    return 0 <= call < result


def _verdict(
    made: Case, truth: Expected | NotApplicable, bridger: Bridger, vocabulary: VocabularyTokenizer
) -> tuple[Verdict, str]:
    if isinstance(truth, NotApplicable):
        return Verdict.NOT_APPLICABLE, _must_refuse(made, truth, bridger, vocabulary)
    stop = vocabulary.token_id(truth.stop) if truth.stop else None
    said = vocabulary.encode(truth.said)
    verdict, detail = Verdict.EXACT, ""
    for sampled in (said, respelled(said, vocabulary)):
        ids = [*sampled, *([stop] if stop is not None else [])]
        try:
            bridge = bridger.bridge(truth.history, made.new, made.tools, sampled=ids, stop=stop)
        except Unbridgeable as refusal:
            return Verdict.REFUSED, f"{refusal.property.value}"
        fault = _fault(truth, bridge, vocabulary)
        if fault:
            return Verdict.WRONG, fault
        detail = bridge.junction.anchor.value
    return verdict, detail


def _must_refuse(made: Case, why: NotApplicable, bridger: Bridger, vocabulary: VocabularyTokenizer) -> str:
    return str(why)


def _fault(truth: Expected, bridge: Bridge, vocabulary: VocabularyTokenizer) -> str:
    got = vocabulary.decode(bridge.ids)
    if got != truth.text:
        return f"expected {truth.text!r}, got {got!r}"
    ids = vocabulary.encode(truth.stop + truth.text)[1 if truth.stop else 0 :]
    if ids != bridge.ids:
        return f"expected {ids}, got {bridge.ids}"
    if bridge.junction.inserted != len(bridge.ids):
        return "the junction counts other ids"
    if truth.stop and (bridge.junction.anchor is Anchor.STOP) != truth.anchored:
        return f"anchored on {bridge.junction.anchor}"
    return ""


def respelled(ids: Sequence[int], vocabulary: VocabularyTokenizer) -> list[int]:
    """The same text in other ids: every third one that can be is split into two."""
    pieces = vocabulary.pieces
    assert pieces is not None
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
