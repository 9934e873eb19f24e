"""`TokenSampling` and `TokenFeature` against the table of sampling fields."""

from __future__ import annotations

import dataclasses

from runner.engines.function.token_function import TokenFeature, TokenSampling
from runner.sampling_fields import SAMPLING_FIELDS, sampling_names

DEFAULTS = {
    each.name: each.default for each in dataclasses.fields(TokenSampling) if each.default is not dataclasses.MISSING
}


def test_token_sampling_has_the_defaults_of_the_table() -> None:
    assert DEFAULTS.keys() - SAMPLING_FIELDS.keys() == {"constraint"}
    assert {name: SAMPLING_FIELDS[name].default for name in DEFAULTS if name != "constraint"} | {
        "constraint": None
    } == DEFAULTS


def test_token_features_are_the_fields_that_change_a_turn() -> None:
    assert set(TokenFeature) == {*sampling_names(changes=True), "logprobs", "constraint"}
    assert {*TokenFeature} <= DEFAULTS.keys()
