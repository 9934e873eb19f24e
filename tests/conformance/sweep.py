"""Plays the corpus: every template through every scenario after every past, and a verdict for each."""

from __future__ import annotations

import contextlib
import enum
import functools
import multiprocessing
import random
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runner.tokens.bridge import Bridge, Bridger, Unbridgeable
from runner.tokens.template import Renderer, TemplateRaised
from runner.tokens.tokenizer import VocabularyTokenizer
from tests.conformance.corpus import VARIABLES, Entry, corpus, every_control_token
from tests.conformance.expected import Expected, NotApplicable, expected
from tests.conformance.scenarios import Case, Past, Scenario, case
from tests.tokens import vocabularies

__all__ = ["Outcome", "Verdict", "host", "is_tool_capable", "play", "sweep", "verdicts_of"]


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


@functools.cache
def host() -> VocabularyTokenizer:
    """One vocabulary for all templates: Qwen's, with the control tokens of all of them."""
    return vocabularies.host(every_control_token(), eos_token=END_OF_TEXT)


def sweep(entries: Sequence[Entry] | None = None, *, processes: int = 2) -> list[Outcome]:
    """Plays all templates, or `entries`, in order."""
    chosen = corpus() if entries is None else entries
    if processes == 1:
        return [outcome for entry in chosen for outcome in play(entry)]
    host()
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        return [outcome for outcomes in pool.imap(play, chosen, chunksize=8) for outcome in outcomes]


def play(entry: Entry) -> list[Outcome]:
    """All cases of one template with one bridger on the host vocabulary, the simple pasts first."""
    capable = is_tool_capable(entry)
    cases = [
        case(scenario, past, tools=capable)
        for past in Past
        for scenario in Scenario
        if capable or not (scenario.needs_tools or past.has_tools())
    ]
    verdicts = verdicts_of(cases, entry.renderer(), host(), END_OF_TEXT)
    return [
        Outcome(entry.name, entry.family, made.scenario, made.past, verdict, detail, capable)
        for made, (verdict, detail) in zip(cases, verdicts, strict=True)
    ]


def verdicts_of(
    cases: Sequence[Case], renderer: Renderer, vocabulary: VocabularyTokenizer, end_of_text: str
) -> list[tuple[Verdict, str]]:
    """A verdict and its detail for each case, all bridged by one bridger in that order."""
    truths: list[Expected | NotApplicable] = []
    for made in cases:
        try:
            truths.append(expected(made, renderer, end_of_text))
        except NotApplicable as why:
            truths.append(why)
    names = {truth.stop for truth in truths if isinstance(truth, Expected) and truth.stop} | {end_of_text}
    stops = [token_id for name in sorted(names) if (token_id := vocabulary.token_id(name)) is not None]
    bridger = Bridger(vocabulary, renderer, stops)
    return [_verdict(made, truth, bridger, vocabulary) for made, truth in zip(cases, truths, strict=True)]


def is_tool_capable(entry: Entry) -> bool:
    """A call's argument and its result are seen in a render with tools, in that order."""
    made = case(Scenario.TOOL_RESULT, Past.SHORT)
    try:
        text = entry.renderer().render([*made.history, *made.new], tools=list(made.tools))
    except TemplateRaised:
        return False
    call, result = text.find(made.last_word), text.find(made.new[0]["content"].split(" ", 1)[0])
    return 0 <= call < result


def _verdict(
    made: Case, truth: Expected | NotApplicable, bridger: Bridger, vocabulary: VocabularyTokenizer
) -> tuple[Verdict, str]:
    if isinstance(truth, NotApplicable):
        return _not_applicable(made, truth, bridger, vocabulary)
    stop = vocabulary.token_id(truth.stop) if truth.stop else None
    if truth.stop and stop is None:
        return Verdict.NOT_APPLICABLE, "the vocabulary lacks the stop"
    said = vocabulary.encode(truth.said)
    verdict, detail = Verdict.EXACT, ""
    for sampled in (said, respelled(said, vocabulary)):
        ids = [*sampled, *([stop] if stop is not None else [])]
        try:
            bridge = bridger.bridge(list(truth.history), list(made.new), list(made.tools), sampled=ids, stop=stop)
        except Unbridgeable as refusal:
            return Verdict.REFUSED, f"{refusal.property.value}"
        fault = _fault(truth, bridge, vocabulary)
        if fault:
            return Verdict.WRONG, fault
        detail = bridge.junction.anchor.value
    return verdict, detail


def _not_applicable(
    made: Case, why: NotApplicable, bridger: Bridger, vocabulary: VocabularyTokenizer
) -> tuple[Verdict, str]:
    """Where the template's renders have no tail, any bridge is a wrong one."""
    if why.must_refuse:
        with contextlib.suppress(Unbridgeable):
            sampled = vocabulary.encode("Some words")
            bridge = bridger.bridge(list(made.history), list(made.new), list(made.tools), sampled=sampled, stop=None)
            return Verdict.WRONG, f"{why}, got {vocabulary.decode(bridge.ids)!r}"
    return Verdict.NOT_APPLICABLE, str(why)


def _fault(truth: Expected, bridge: Bridge, vocabulary: VocabularyTokenizer) -> str:
    got = vocabulary.decode(bridge.ids)
    if unicodedata.normalize("NFC", got) != unicodedata.normalize("NFC", truth.text):
        return f"expected {truth.text!r}, got {got!r}"
    ids = vocabulary.encode(truth.stop + truth.text)[1 if truth.stop else 0 :]
    if ids != bridge.ids:
        return f"expected {ids}, got {bridge.ids}"
    if bridge.junction.inserted != len(bridge.ids):
        return "the junction counts other ids"
    return ""


def respelled(ids: Sequence[int], vocabulary: VocabularyTokenizer) -> list[int]:
    """The same text in other ids: every third one that can be is split into two."""
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
