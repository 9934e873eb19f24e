"""Sampling: refused values with field and fix, and the combination of layers."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest

from runner import BadOption, Sampling
from runner.options import UNSET
from runner.sampling_fields import MAX_LOGPROBS, SAMPLING_FIELDS

NAN, INFINITE = math.nan, math.inf

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"min_tokens": value}, "give a whole number of at least 0") for value in (-1, 1.5, "3", True, None, NAN)),
    ({"min_tokens": 20, "max_tokens": 10}, r"max_tokens=10\): .* give min_tokens of at most max_tokens"),
    *(({"repetition_penalty": value}, "give a finite number above 0") for value in (0, -1, NAN, INFINITE, "1.2", None)),
    *(
        ({name: value}, "give a number of at least -2 and at most 2")
        for name in ("presence_penalty", "frequency_penalty")
        for value in (-2.1, 2.1, NAN, -INFINITE, "1", None, True)
    ),
    *(({"logit_bias": value}, r"give a dictionary of numbers by token id") for value in ([(1, 2)], "1=2", 5)),
    *(
        ({"logit_bias": {key: 1.0}}, "is not a token id; give a whole number of at least 0")
        for key in ("7", -1, 1.5, True)
    ),
    *(({"logit_bias": {7: value}}, "at least -100 and at most 100") for value in (-101, 101, NAN, "1", None)),
    *(
        ({"bad_words": value}, "give a tuple of strings, none of them empty or only white space")
        for value in ("moon", ("",), ("moon", " \n"), (5,), None, 5)
    ),
    *(({"ignore_eos": value}, "give True or False") for value in (1, "yes", None)),
    *(
        ({"logprobs": value}, "give a whole number of at least 0 and at most 20")
        for value in (-1, 21, 2.5, True, "5", NAN)
    ),
]


@pytest.mark.parametrize(("given", "fix"), REFUSED, ids=str)
def test_invalid_value_is_refused_with_field_and_fix(given: dict[str, Any], fix: str) -> None:
    with pytest.raises(BadOption, match=rf"^Sampling\({next(iter(given))}=.*{fix}"):
        Sampling(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"min_tokens": 0},
        {"min_tokens": 10, "max_tokens": 10},
        {"repetition_penalty": 0.1},
        {"presence_penalty": -2, "frequency_penalty": 2.0},
        {"logit_bias": {}},
        {"logit_bias": {0: -100, 7: 100.0}},
        {"logit_bias": None},
        {"bad_words": ()},
        {"bad_words": ("moon", " the sun")},
        {"ignore_eos": True},
        {"logprobs": 0},
        {"logprobs": MAX_LOGPROBS},
    ],
    ids=str,
)
def test_value_at_its_bounds_is_accepted(given: dict[str, Any]) -> None:
    assert Sampling(**given).given() == given


def test_default_of_every_field_is_valid() -> None:
    defaults = Sampling.defaults()
    assert UNSET not in defaults.given().values()
    assert list(SAMPLING_FIELDS) == [field.name for field in dataclasses.fields(Sampling)]
    assert defaults.given().keys() == SAMPLING_FIELDS.keys()


def test_logprobs_none_equals_zero() -> None:
    assert Sampling(logprobs=None) == Sampling(logprobs=0)
    assert Sampling(logprobs=None).over(Sampling(logprobs=5)).logprobs == 0


def test_set_fields_override_lower_layers() -> None:
    below = Sampling(min_tokens=2, bad_words=("moon",), logit_bias={7: 1.0}, logprobs=3, ignore_eos=True)
    above = Sampling(bad_words=(), logit_bias={8: 2.0}, ignore_eos=False, presence_penalty=0.5).over(below)
    assert (above.min_tokens, above.bad_words, above.logit_bias) == (2, (), {8: 2.0})
    assert (above.logprobs, above.ignore_eos, above.presence_penalty) == (3, False, 0.5)


def test_min_tokens_above_max_tokens_of_a_layer_is_refused() -> None:
    with pytest.raises(BadOption, match=r"Sampling\(min_tokens=2000, max_tokens=1024\)"):
        Sampling(min_tokens=2000).over(Sampling.defaults())


def test_later_changes_of_logit_bias_have_no_effect() -> None:
    bias = {7: 1.0}
    sampling = Sampling(logit_bias=bias)
    bias[8] = 2.0
    assert sampling.logit_bias == {7: 1.0}


def test_ids_outside_the_vocabulary_are_refused() -> None:
    Sampling(logit_bias={9: 1.0}, logprobs=10).check_vocabulary(10)
    with pytest.raises(BadOption, match=r"Sampling\(logit_bias=\{10: \.\.\.\}\): the model's ids are 0 to 9"):
        Sampling(logit_bias={9: 1.0, 10: 1.0}).check_vocabulary(10)
    with pytest.raises(BadOption, match=r"Sampling\(logprobs=11\): the model has 10 ids; give at most 10"):
        Sampling(logprobs=11).check_vocabulary(10)


def test_min_tokens_shrinks_with_the_available_room() -> None:
    short = Sampling(min_tokens=50).over(Sampling.defaults()).shortened(8)
    assert (short.min_tokens, short.max_tokens) == (8, 8)


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_k": -1, "n": 4, "logprobs": 1, "seed": 3}, {"temperature": 0.5, "top_k": 0}),
        ({"max_new_tokens": 9, "min_new_tokens": 2, "stop": "x"}, {"max_tokens": 9, "min_tokens": 2, "stop": ("x",)}),
        ({"stop": ["x", "y"], "stop_token_ids": [1]}, {"stop": ("x", "y"), "stop_ids": (1,)}),
        ({"max_tokens": None, "ignore_eos": True, "top_p": 0.9}, {"ignore_eos": True, "top_p": 0.9}),
        (SimpleNamespace(temperature=0, max_tokens=7, logprobs=2), {"temperature": 0, "max_tokens": 7}),
    ],
    ids=["nothing", "vLLM", "SGLang", "lists", "None", "attributes"],
)
def test_request_of_a_trainer_is_read_as_sampling(request_fields: Any, expected: dict[str, Any]) -> None:
    assert Sampling.of_request(request_fields).given() == expected


def test_request_with_a_value_out_of_range_is_refused() -> None:
    with pytest.raises(BadOption, match=r"Sampling\(temperature=-1\)"):
        Sampling.of_request({"temperature": -1})
