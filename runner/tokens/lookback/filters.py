"""Filters and methods of values that are not wholly known, those above all that keep where the turn's words end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2

from runner.tokens.lookback.expressions import Operations, Raised
from runner.tokens.lookback.positions import mapped
from runner.tokens.lookback.values import (
    END,
    MAYBE,
    Arguments,
    GaveUp,
    Given,
    Past,
    PastMessage,
    Position,
    Root,
    Split,
    Text,
    Unknown,
    Value,
    concatenated,
    holds_end,
    is_concrete,
    is_given,
    is_text,
    joined,
)

__all__ = ["Filters"]


class Filters(Operations):
    """Operations, and what filters and methods make of values."""

    # --- filters

    def filtered(self, name: str, value: Value, arguments: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
        everything = (value, *arguments, *keywords.values())
        if all(map(is_concrete, everything)):
            if name not in self._environment.filters:
                raise Raised(f"no filter named {name!r}")
            return self.concrete(
                lambda: _plain(
                    self._environment.call_filter(
                        name, value, list(arguments), dict(keywords), self._context, self._eval_context
                    )
                )
            )
        known = self._followed(name, value, arguments, keywords)
        if known is not None:
            return known
        return self.of("filter " + name, *everything, *keywords, text=name in _TEXT_FILTERS)

    def _followed(
        self, name: str, value: Value, arguments: Sequence[Value], keywords: Mapping[str, Value]
    ) -> Value | None:
        """What a filter makes of a value that is partly known; None where nothing of it is followed."""
        match name:
            case "default" | "d":
                given = dict(zip(("default_value", "boolean"), arguments, strict=False)) | dict(keywords)
                return self._default(value, given.get("default_value", ""), given.get("boolean", False))
            case "tojson":
                return self._as_json(value, keywords) if not arguments else None
            case "map" if isinstance(value, Past | list) and not arguments and set(keywords) == {"attribute"}:
                return mapped(value, lambda each: self._dotted(each, keywords["attribute"]))
        if keywords:
            return None
        match name:
            case "trim" | "lower" | "replace" if is_text(value):
                return self.method(value, "strip" if name == "trim" else name, arguments)
            case "string" | "safe":
                return self.written(value)
            case "length" | "count":
                return self.length(value)
            case "list" if isinstance(value, list | tuple | Past | Split):
                return value
            case "first" | "last" if isinstance(value, list | tuple | Past | Split):
                return self.item(value, 0 if name == "first" else -1)
            case "selectattr" | "rejectattr" if isinstance(value, Past | list):
                return self._selected(value, name == "selectattr", arguments)
            case "join" if isinstance(value, list) and len(arguments) <= 1:
                return self._joined(value, arguments[0] if arguments else "")
            case "items" | "dictsort" if not arguments:
                return _pairs(value, in_order=name == "dictsort")
        return None

    def _default(self, value: Value, otherwise: Value, falsy: Value) -> Value:
        if isinstance(value, jinja2.Undefined):
            return otherwise
        if not isinstance(falsy, bool) or (isinstance(value, Unknown | Given) and not value.text):
            return self.of("default", value, otherwise, falsy)  # it may be undefined
        truth = self.truth(value) if falsy else True
        if isinstance(truth, bool):
            return value if truth else otherwise
        return self.of("default", value, otherwise, falsy, text=is_text(value) and is_text(otherwise))

    def length(self, value: Value) -> Value:
        if isinstance(value, Past):
            return value.length
        if isinstance(value, list | tuple | dict):
            return len(value)
        if is_text(value) and self.truth(value) is True and not is_given(value):
            return Position(Root(1), 0)
        return self.of("length", value)

    def _as_json(self, value: Value, keywords: Mapping[str, Value]) -> Value:
        leaves = list(_leaves(value))
        held = [index for index, leaf in enumerate(leaves) if holds_end(leaf)]
        behind = leaves[held[0] :] if len(held) == 1 and "sort_keys" not in keywords else []
        if not behind or not all(map(is_given, [*behind[1:], *keywords.values()])):
            return self.of("tojson", value, *keywords, *keywords.values(), text=True)
        leaf = behind[0]
        head = self._symbols.of("tojson", value, *keywords, *keywords.values()) if is_given(value) else None
        if isinstance(leaf, Text) and leaf is value and leaf.has_end and isinstance(leaf.rest, str) and not keywords:
            return Text((END, json.dumps(leaf.rest, ensure_ascii=False)[1:]), head)
        rest = (
            leaf.name
            if isinstance(leaf, Arguments)
            else leaf.rest
            if isinstance(leaf, Text) and leaf.has_end
            else Unknown()
        )
        if not is_given(rest):
            return Unknown(ends=True, text=True)
        end = self._symbols.of("json end", rest, *behind[1:], *keywords, *keywords.values())
        return Text((END, dataclasses.replace(end, text=True, filled=True)), head)

    def _joined(self, values: Sequence[Value], separator: Value) -> Value:
        parts: list[Value] = []
        for value in values:
            parts += [separator, self.written(value)] if parts else [self.written(value)]
        made: Value = ""
        for part in parts:
            made = concatenated(made, part)
        return made

    def _selected(self, value: Past | list[Value], wanted: bool, arguments: Sequence[Value]) -> Value:
        attribute, *test = arguments
        name, *against = test or ["truth"]
        kept = []
        for each in value.items if isinstance(value, Past) else value:
            found = self._dotted(each, attribute)
            told = self.truth(found) if name == "truth" else self.tested(name, found, against)
            if not isinstance(told, bool):
                return self.of("selected", value, *arguments)
            if told is wanted:
                kept.append(each)
        if isinstance(value, Past):
            return Past(tuple(kept), Root(0), 0, (), value.messages, value.backwards)
        return kept

    def _dotted(self, value: Value, name: Value) -> Value:
        if not isinstance(name, str):
            raise GaveUp("an attribute that is not named")
        for part in name.split("."):
            value = self.item(value, part) if isinstance(value, dict) else self.attribute(value, part)
        return value

    # --- methods

    def method(self, value: Value, name: str, arguments: Sequence[Value]) -> Value:
        """What a method of a string or a mapping gives."""
        if is_concrete(value) and all(map(is_concrete, arguments)):
            return self.concrete(lambda: _plain(self._environment.getattr(value, name)(*arguments)))
        if isinstance(value, PastMessage):
            return self._got(value.get, value.has, arguments) if name == "get" else Unknown()
        if isinstance(value, dict):
            return self._method_of_mapping(value, name, arguments)
        if isinstance(value, Arguments) and name == "items":
            return value.pairs
        if isinstance(value, Text) and value.is_marked:
            return self._method_of_words(value, name, arguments)
        return self.of("method " + name, value, *arguments, text=name in _TEXT_METHODS)

    def _got(
        self, get: Callable[[str], Value], has: Callable[[str], bool | Unknown], arguments: Sequence[Value]
    ) -> Value:
        key, otherwise = (*arguments, None)[:2]
        if not isinstance(key, str):
            return Unknown(ends=True)
        found = has(key)
        if isinstance(found, bool):
            return get(key) if found else otherwise
        return Unknown(ends=holds_end(otherwise))

    def _method_of_mapping(self, value: dict[Any, Value], name: str, arguments: Sequence[Value]) -> Value:
        if not all(map(is_concrete, value)):
            return self.of("method " + name, value, *arguments)
        if name == "get":
            return self._got(value.__getitem__, lambda key: key in value, arguments)
        listed = {"items": value.items, "keys": value.keys, "values": value.values}.get(name)
        return list(listed()) if listed else self.of("method " + name, value, *arguments)

    def _method_of_words(self, value: Text, name: str, arguments: Sequence[Value]) -> Value:
        """Of a text in which the turn's words end: END is a word of small letters and digits."""
        rest = value.rest
        head = None if value.head is None else (name, *arguments, value.head)
        if name == "lstrip":
            return dataclasses.replace(value, head=head)
        plain = isinstance(rest, str) and all(map(is_concrete, arguments))
        if self._words is not None and name in ("replace", "split") and rest != "":
            return Unknown(ends=True, text=name == "replace")  # what is looked for may begin in the words
        if plain and value.has_end:
            if name in ("strip", "rstrip") and not _eats_letters(arguments):
                return joined((Text((END,), head), rest.rstrip(*arguments)))
            if name == "lower":
                return joined((Text((END,), head), rest.lower()))
            if name == "replace" and _is_no_word(arguments[0]):
                return joined((Text((END,), head), rest.replace(*arguments)))
            if name == "split" and len(arguments) == 1 and _is_no_word(arguments[0]):
                behind = rest.split(*arguments)
                last = joined((Text((END,), head), behind[0])) if len(behind) == 1 else behind[-1]
                return Split(last, given=value.head is not None)
        elif name in ("strip", "rstrip") and is_given(rest) and all(map(is_given, arguments)):
            return Text((MAYBE, self._symbols.of("rstrip", rest, *arguments, text=True)))
        return self.of("method " + name, value, *arguments, text=name in _TEXT_METHODS)


def _pairs(value: Value, *, in_order: bool) -> Value | None:
    """Keys and values of a mapping; in the order of the keys where that is asked for, which then must be known."""
    if isinstance(value, Arguments):
        return value.pairs
    if not isinstance(value, dict):
        return None
    if not in_order:
        return list(value.items())
    return (
        sorted(value.items(), key=lambda pair: pair[0].lower()) if all(isinstance(key, str) for key in value) else None
    )


def _leaves(value: Value) -> Iterator[Value]:
    """What a structure holds, in the order in which it is written."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _eats_letters(arguments: Sequence[Value]) -> bool:
    return any(not isinstance(each, str) or any(map(str.isalnum, each)) for each in arguments)


def _is_no_word(text: Value) -> bool:
    """No part of the letters and digits that END stands for can be part of it."""
    return isinstance(text, str) and bool(text) and not (text[0].isalnum() and text[-1].isalnum() and text.isalnum())


_TEXT_FILTERS = frozenset(
    {"upper", "lower", "trim", "string", "capitalize", "title", "join", "indent", "replace", "format"}
)
_TEXT_METHODS = frozenset({"strip", "lstrip", "rstrip", "replace", "upper", "lower", "title", "capitalize", "format"})


def _plain(value: Any) -> Any:
    """What filters and methods make as they go is made at once: a generator is empty the second time."""
    if isinstance(value, type({}.items()) | type({}.keys()) | type({}.values())):
        return list(value)
    return list(value) if hasattr(value, "__next__") else value
