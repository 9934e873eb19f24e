"""Every public chat template is bridged exactly or refused by name, after any history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from runner.tokens.bridging.bridge import Bridge, Bridger, Property, Unbridgeable
from runner.tokens.tool_support import shows_tools
from tests import sweeps
from tests.conformance.argument_kinds import KINDS
from tests.conformance.corpus import Entry, corpus
from tests.conformance.expected import expected
from tests.conformance.real import PAIRS, Pair, Tally, play_all, play_pair
from tests.conformance.record import HISTORY_DEPENDENT, chosen, fresh, read, rows_of
from tests.conformance.report import faults, page
from tests.conformance.scenarios import Past, Scenario, case
from tests.conformance.shown import look, look_all
from tests.conformance.sweep import Outcome, Verdict, is_tool_capable, play, sweep
from tests.conformance.vocabulary import END_OF_TEXT
from tests.repository import DOCS

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5), pytest.mark.sample_functions(2)]

PAGE = DOCS / "conformance.md"

RENDERABLE = {
    Scenario.TOOL_RESULT: 362,
    Scenario.TEXT_AND_CALL: 349,
    Scenario.PARALLEL_RESULTS: 334,
    Scenario.RESULT_AND_USER: 353,
    Scenario.SECOND_ROUND: 361,
    Scenario.AFTER_ROUND_WITH_REASONING: 357,
    Scenario.AFTER_REASONING: 722,
    Scenario.AFTER_ANSWER: 724,
    Scenario.CUT_ANSWER: 731,
    Scenario.CUT_IN_CALL: 359,
    Scenario.CUT_AFTER_CALL: 357,
    Scenario.SYSTEM: 502,
}
"""Minimum number of templates that render a scenario after a short past."""

MISSED = dict.fromkeys(Scenario, 0) | {Scenario.SYSTEM: 2, Scenario.AFTER_ANSWER: 1, Scenario.AFTER_REASONING: 1}
"""Maximum number of templates that are refused although the bridge would be right.

SingGuard writes the whole conversation into one message, so the beginning of a turn is unknown.
"""


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return sweep()


@pytest.fixture(scope="module")
def tallies() -> list[Tally]:
    return play_all()


def named(name: str) -> Entry:
    return next(entry for entry in corpus() if entry.name == name)


def of(outcomes: Sequence[Outcome], *verdicts: Verdict, scenario: Scenario, past: Past = Past.SHORT) -> list[Outcome]:
    return [o for o in outcomes if o.scenario is scenario and o.past is past and o.verdict in verdicts]


def test_the_corpus_is_whole() -> None:
    entries = corpus()
    assert len(entries) == 786
    assert sum(len(entry.models) for entry in entries) == 4387


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", chosen())
def test_a_template_is_bridged_as_exactly_as_ever(name: str) -> None:
    assert fresh(named(name)) == read()[name]


@pytest.mark.parametrize("name", ["mistralai-Codestral-22B-v0.1", "BAAI-BGE-VL-MLLM-S1"], ids=["refused", "no right"])
def test_refusal_with_another_property_differs_from_the_record(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    right = Bridger.bridge

    def bridge(*given: Any, **named: Any) -> Bridge:
        try:
            return right(*given, **named)
        except Unbridgeable as refusal:
            raise Unbridgeable(Property.TURNS_SAMPLED, "another") from refusal

    monkeypatch.setattr(Bridger, "bridge", bridge)
    played, recorded = fresh(named(name)), read()[name]
    assert {*played.verdicts} & {*"rn"}
    assert (played.traits, played.verdicts) == (recorded.traits, recorded.verdicts)
    assert played.reasons != recorded.reasons


def test_record_covers_all_templates_without_a_wrong_verdict() -> None:
    assert read().keys() == {entry.name for entry in corpus()}
    assert not [of_it for of_it in read().values() if "W" in of_it.verdicts]


@pytest.mark.parametrize("name", HISTORY_DEPENDENT)
def test_tail_that_depends_on_the_history_uses_the_whole_history(name: str) -> None:
    assert depends_on_history(named(name))
    deep = [o for o in play(named(name)) if o.past is Past.ROUNDS and o.scenario.needs_tools]
    assert any(o.verdict is Verdict.EXACT for o in deep)
    assert [o for o in deep if o.verdict is Verdict.WRONG] == []


# --- the whole sweep


@pytest.mark.whole
def test_the_tool_capable_templates_are_as_many_as_ever() -> None:
    assert sum(map(is_tool_capable, corpus())) == 377


@pytest.mark.whole
def test_no_bridge_is_wrong(outcomes: list[Outcome]) -> None:
    assert faults(outcomes) == []


@pytest.mark.whole
def test_every_refusal_names_a_property(outcomes: list[Outcome]) -> None:
    assert {o.detail for o in outcomes if o.verdict is Verdict.REFUSED} <= {*map(str, Property)}


@pytest.mark.whole
@pytest.mark.parametrize("scenario", RENDERABLE)
def test_a_scenario_is_renderable_for_as_many_templates_as_ever(outcomes: list[Outcome], scenario: Scenario) -> None:
    found = of(outcomes, Verdict.EXACT, Verdict.REFUSED, Verdict.WRONG, scenario=scenario)
    assert len(found) >= RENDERABLE[scenario]


@pytest.mark.whole
@pytest.mark.parametrize("scenario", MISSED)
def test_a_scenario_is_bridged_for_all_but_a_few_templates(outcomes: list[Outcome], scenario: Scenario) -> None:
    refused = of(outcomes, Verdict.REFUSED, Verdict.WRONG, scenario=scenario)
    assert len(refused) <= MISSED[scenario], sorted({f"{o.template}: {o.detail}" for o in refused})


@pytest.mark.whole
def test_templates_with_tools_are_bridged_in_99_of_100_cases(outcomes: list[Outcome]) -> None:
    unbridgeable = (Verdict.NOT_APPLICABLE, Verdict.NO_EXACT_BRIDGE)
    renderable = [o for o in outcomes if o.tools and o.verdict not in unbridgeable]
    bridged = [o for o in renderable if o.verdict is Verdict.EXACT]
    assert len(bridged) >= 0.99 * len(renderable)


def depends_on_history(entry: Entry) -> bool:
    """True if the same turn with the same results has another tail without the earlier messages."""
    renderer = entry.renderer()
    for scenario in (Scenario.TOOL_RESULT, Scenario.PARALLEL_RESULTS):
        deep = case(scenario, Past.ROUNDS)
        alone = replace(deep, history=(case(scenario, Past.SHORT).history[0], deep.history[-1]))
        if expected(deep, renderer, END_OF_TEXT).text != expected(alone, renderer, END_OF_TEXT).text:
            return True
    return False


def test_most_templates_write_the_same_whatever_came_before() -> None:
    assert not depends_on_history(named("Qwen-Qwen2.5-7B-Instruct"))


Spoil = Callable[[Bridge], Bridge]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda bridge: replace(bridge, ids=bridge.ids[1:]),
        lambda bridge: replace(bridge, ids=[*bridge.ids, bridge.ids[-1]]),
        lambda bridge: replace(bridge, junction=replace(bridge.junction, inserted=1)),
    ],
    ids=["first id lost", "last id twice", "wrong count"],
)
def test_a_bridge_that_is_not_the_templates_is_called_wrong(monkeypatch: pytest.MonkeyPatch, spoil: Spoil) -> None:
    right = Bridger.bridge
    monkeypatch.setattr(Bridger, "bridge", lambda *given, **named: spoil(right(*given, **named)))
    assert {o.verdict for o in play(named("Qwen-Qwen2.5-7B-Instruct"))} <= {
        Verdict.WRONG,
        Verdict.NOT_APPLICABLE,
        Verdict.NO_EXACT_BRIDGE,
    }


REFUSED = {"mistralai-Codestral-22B-v0.1": ["system_moves"]}
"""Codestral's template writes the system message before the last user message, in any history."""


def one_pair_of_each_vocabulary() -> list[Pair]:
    pairs = [[pair for pair in PAIRS if pair.vocabulary == name] for name in dict.fromkeys(p.vocabulary for p in PAIRS)]
    return [sweeps.part(of_it, len(of_it))[0] for of_it in pairs]


@pytest.mark.parametrize("pair", one_pair_of_each_vocabulary(), ids=str)
def test_bridged_ids_of_a_real_vocabulary_are_the_templates_ids(pair: Pair) -> None:
    tally = play_pair(pair, wanted=40)
    assert tally.wrong == []
    assert {*tally.refused} <= {*REFUSED.get(pair.template, [])}
    assert sum(tally.anchors.values()) + sum(tally.refused.values()) == 40


@pytest.mark.whole
def test_real_vocabularies_give_the_templates_own_ids(tallies: list[Tally]) -> None:
    assert [tally.wrong for tally in tallies if tally.wrong] == []
    refused = {tally.pair.template: dict(tally.refused) for tally in tallies if tally.refused}
    assert {name: [*why] for name, why in refused.items()} == REFUSED
    said = sum(sum(tally.anchors.values()) for tally in tallies) + sum(sum(why.values()) for why in refused.values())
    assert said == 200 * len(PAIRS)


PASSES_OVER = ("unsloth-gpt-oss-20b", "google-gemma-4-E4B-it", "ByteDance-Seed-OSS", "openbmb-MiniCPM3-4B")


def test_every_kind_of_argument_is_shown_to_the_model() -> None:
    some = [entry for entry in sweeps.part(corpus(), 80) if is_tool_capable(entry) and shows_tools(entry.renderer())]
    rows = [look(entry) for entry in some]
    assert rows
    assert {row.name: row.unseen for row in rows if row.unseen} == {}
    assert len(KINDS) == 56


@pytest.mark.parametrize("name", PASSES_OVER)
def test_template_without_references_shows_few_schemas_as_written(name: str) -> None:
    shown = look(named(name))
    assert shown.fitted
    assert shown.unseen == ()
    assert shown.written < 40


@pytest.mark.whole
def test_published_page_and_record_equal_a_fresh_sweep(outcomes: list[Outcome], tallies: list[Tally]) -> None:
    text = page(outcomes, tallies, look_all(processes=2))
    assert PAGE.read_text(encoding="utf-8") == text, "run python -m tests.conformance --write"
    assert read() == {row.name: row for row in rows_of(outcomes, processes=2)}, "the record is unchanged"
