"""Bridges on vocabularies with other white space: comparing them with the real words refuses none."""

from __future__ import annotations

import functools

import pytest

from runner.tokens.bridging.bridge import Bridger
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.tokenizer import VocabularyTokenizer
from runner.tokens.turn_shape import AnsweredTurn
from tests import sweeps
from tests.conformance.corpus import Entry, corpus, every_control_token
from tests.conformance.expected import Expected, NotApplicable, expected
from tests.conformance.scenarios import Past, Scenario, case
from tests.conformance.sweep import is_tool_capable
from tests.conformance.vocabulary import END_OF_TEXT
from tests.tokens.vocabularies import vocabulary


@functools.cache
def extended(name: str) -> VocabularyTokenizer:
    """Return a vocabulary with the control tokens of all templates."""
    base = vocabulary(name)
    return base.extended([each for each in every_control_token() if base.token_id(each) is None], eos_token=END_OF_TEXT)


def bridged(entry: Entry, truth: Expected, answered: AnsweredTurn, name: str, *, real: bool) -> list[int] | None:
    """Return the ids of a bridge, compared with the `real` words or not; None if the bridge is refused."""
    tokenizer = extended(name)
    stop = tokenizer.token_id(truth.stop) if truth.stop else None
    stops = [each for each in dict.fromkeys((stop, tokenizer.token_id(END_OF_TEXT))) if each is not None]
    bridger = Bridger(tokenizer, entry.renderer(), stops)
    sampled = [*tokenizer.encode(truth.said), *([] if stop is None else [stop])]
    try:
        tail = bridger.locality.whole_tail(answered, real=real)
        return list(bridger.join(tail, sampled=sampled, stop=stop).ids)
    except Unbridgeable:
        return None


@pytest.mark.parametrize("name", ["mistral_sentencepiece", "gemma"])
def test_real_words_refuse_no_bridge_of_another_vocabulary(name: str) -> None:
    compared = 0
    for entry in list(corpus())[:: sweeps.times(1, 32)]:
        capable = is_tool_capable(entry)
        for scenario in Scenario:
            if scenario.needs_tools and not capable:
                continue
            made = case(scenario, Past.SHORT, tools=capable)
            try:
                truth = expected(made, entry.renderer(), END_OF_TEXT)
            except NotApplicable:
                continue
            answered = AnsweredTurn(list(truth.history), list(made.new), list(made.tools))
            alone = bridged(entry, truth, answered, name, real=False)
            assert bridged(entry, truth, answered, name, real=True) == alone, (entry.name, scenario)
            compared += alone is not None
    assert compared > 50
