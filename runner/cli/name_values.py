"""Options that are given as `name=value`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from runner.environment.loading import json_or_text
from runner.errors import BadOption
from runner.options import Limits

__all__ = ["parse_limits", "parse_logit_bias", "parse_pairs", "parse_value", "parse_values"]

_WORDS = {"true": True, "false": False, "none": None, "null": None}


def parse_pairs(given: Iterable[str] | None, option: str) -> dict[str, str]:
    """The names and values of `name=value`; of an option that was not given there are none.

    Raises:
        BadOption: there is no "=", or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        # At the first "=" only: a value may hold further ones.
        if not equals or not name:
            raise BadOption(f"{option} {text}: write {option} name=value.")
        if name in found:
            raise BadOption(f"{option} {name} is given twice.")
        found[name] = value
    return found


def parse_value(text: str) -> Any:
    """A value as JSON; true, false and none in any case; and anything else as text."""
    return _WORDS[text.lower()] if text.lower() in _WORDS else json_or_text(text)


def parse_values(given: Iterable[str] | None, option: str) -> dict[str, Any]:
    """`parse_pairs`, each value as `parse_value` reads it."""
    return {name: parse_value(value) for name, value in parse_pairs(given, option).items()}


def parse_limits(given: Iterable[str] | None) -> Limits:
    """Limits from `name=value`; none lifts one.

    Raises:
        BadOption: there is no such limit, or its value cannot be.
    """
    known = [field.name for field in dataclasses.fields(Limits)]
    values = parse_values(given, "--limit")
    for name in values:
        if name not in known:
            close = get_close_matches(name, known, 1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise BadOption(f"--limit {name}: there is no such limit.{meant} There are {', '.join(known)}.")
    return Limits(**values)


def parse_logit_bias(given: Iterable[str] | None) -> dict[int, Any]:
    """Biases from `id=bias`; what the bias is, is for `Sampling` to check.

    Raises:
        BadOption: what stands before the "=" is no token id.
    """
    values = parse_values(given, "--logit-bias")
    for name in values:
        if not name.isdecimal():
            raise BadOption(f"--logit-bias {name}: write a token id and what is added, such as --logit-bias 262=-100.")
    return {int(name): bias for name, bias in values.items()}
