"""Options of the form `name=value`."""

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
    """Return the values by name; an empty dict if the option was not given.

    Raises:
        BadOption: "=" is missing, or a name is given twice.
    """
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        # The text is split only at the first "=", since a value may contain "=" as well.
        if not equals or not name:
            raise BadOption(f"{option} {text}: write {option} name=value.")
        if name in found:
            raise BadOption(f"{option} {name} is given twice: give it once.")
        found[name] = value
    return found


def parse_value(text: str) -> Any:
    """Parse true, false, none and null in any case, then JSON; anything else is text."""
    return _WORDS[text.lower()] if text.lower() in _WORDS else json_or_text(text)


def parse_values(given: Iterable[str] | None, option: str) -> dict[str, Any]:
    """Return the result of `parse_pairs`, with each value parsed by `parse_value`."""
    return {name: parse_value(value) for name, value in parse_pairs(given, option).items()}


def parse_limits(given: Iterable[str] | None) -> Limits:
    """Return the limits of texts `name=value`; the value `none` removes a limit.

    Raises:
        BadOption: a limit is unknown, or its value is invalid.
    """
    known = [field.name for field in dataclasses.fields(Limits)]
    values = parse_values(given, "--limit")
    for name in values:
        if name not in known:
            close = get_close_matches(name, known, 1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise BadOption(f"--limit {name}: unknown limit.{meant} The limits are {', '.join(known)}.")
    return Limits(**values)


def parse_logit_bias(given: Iterable[str] | None) -> dict[int, Any]:
    """Return the biases of texts `id=bias`, by token id; `Sampling` checks the biases.

    Raises:
        BadOption: the text before "=" is not a token id.
    """
    values = parse_values(given, "--logit-bias")
    for name in values:
        if not name.isdecimal():
            raise BadOption(f"--logit-bias {name}: write a token id and a bias, such as --logit-bias 262=-100.")
    return {int(name): bias for name, bias in values.items()}
