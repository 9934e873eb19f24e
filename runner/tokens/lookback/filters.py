"""Transfer functions of filters and methods, mainly of those that keep the end of the turn's words."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2

from runner.tokens.lookback.operators import Operators, RenderRaised
from runner.tokens.lookback.positions import mapped
from runner.tokens.lookback.values import (
    END,
    MAYBE_END,
    GappedList,
    LastArguments,
    NotFollowed,
    PastMessage,
    Position,
    SplitText,
    Symbol,
    Text,
    Unknown,
    UnknownCount,
    Value,
    after_end,
    concatenated,
    is_concrete,
    is_independent,
    is_text,
    may_hold_end,
)

__all__ = ["TransferFunctions"]


class TransferFunctions(Operators):
    """The transfer functions of operators, of filters and of methods."""

    # --- filters

    def filtered(self, name: str, value: Value, arguments: Sequence[Value], keywords: Mapping[str, Value]) -> Value:
        if name not in self._environment.filters:
            raise RenderRaised(f"no filter named {name!r}")
        everything = (value, *arguments, *keywords.values())
        if all(map(is_concrete, everything)):
            return self.concrete(
                lambda: _read_now(
                    self._environment.call_filter(
                        name, value, list(arguments), dict(keywords), self._context, self._eval_context
                    )
                )
            )
        known = self._modelled(name, value, arguments, keywords)
        if known is not None:
            return known
        return self.of("filter " + name, *everything, *keywords, text=name in _TEXT_FILTERS)

    def _modelled(  # noqa: C901  # one case for each filter
        self, name: str, value: Value, arguments: Sequence[Value], keywords: Mapping[str, Value]
    ) -> Value | None:
        """Return the result of a filter for a partly known value; None if no transfer function models this use."""
        match name:
            case "default" | "d":
                given = dict(zip(("default_value", "boolean"), arguments, strict=False)) | dict(keywords)
                return self._default(value, given.get("default_value", ""), given.get("boolean", False))
            case "tojson":
                return self._as_json(value, keywords) if not arguments else None
            case "map" if isinstance(value, GappedList | list) and not arguments and set(keywords) == {"attribute"}:
                return mapped(value, lambda each: self._dotted(each, keywords["attribute"]))
        if keywords:
            return None
        match name:
            case "trim" | "lower" | "replace" if is_text(value):
                return self.method(value, "strip" if name == "trim" else name, arguments)
            case "string" | "safe":
                return self.written(value)
            case "format" if arguments and self._untyped(arguments[-1]) and str(value).endswith(("%s", "%r")):
                return arguments[-1] if is_concrete([value, *arguments[:-1]]) else None
            case "length" | "count":
                return self._length(value)
            case "list" if isinstance(value, list | tuple | GappedList | SplitText):
                return value
            case "first" | "last" if isinstance(value, list | tuple | GappedList | SplitText):
                return self.item(value, 0 if name == "first" else -1)
            case "selectattr" | "rejectattr" if isinstance(value, GappedList | list):
                return self._selected(value, name == "selectattr", arguments)
            case "join" if isinstance(value, list) and len(arguments) <= 1:
                separator = arguments[0] if arguments else ""
                parts = [part for each in value for part in (separator, self.written(each))]
                return concatenated(*parts[1:])
            case "items" | "dictsort" if isinstance(value, LastArguments) and not arguments:
                return value.pairs
        return None

    def _default(self, value: Value, otherwise: Value, falsy: Value) -> Value:
        if isinstance(value, jinja2.Undefined):
            return otherwise
        if not isinstance(falsy, bool) or (isinstance(value, Unknown | Symbol) and not value.text):
            return self.of("default", value, otherwise, falsy)  # the value may be undefined
        truth = self.truth(value) if falsy else True
        if isinstance(truth, bool):
            return value if truth else otherwise
        return self.of("default", value, otherwise, falsy, text=is_text(value) and is_text(otherwise))

    def _length(self, value: Value) -> Value:
        if isinstance(value, GappedList):
            return value.length
        if isinstance(value, list | tuple | dict):
            return len(value)
        if is_text(value) and self.truth(value) is True and not is_independent(value):
            return Position(UnknownCount(1))  # only the minimum length of such a text is known
        return self.of("length", value)

    def _as_json(self, value: Value, keywords: Mapping[str, Value]) -> Value:
        """Return the value as JSON. The text after the turn's words is known if all later parts are independent."""
        leaves = list(_leaves(value))
        ends = [index for index, leaf in enumerate(leaves) if may_hold_end(leaf)]
        # With sorted keys, the parts do not come in the order of `leaves`.
        if len(ends) != 1 or "sort_keys" in keywords:
            return self.of("tojson", value, *keywords, *keywords.values(), text=True)
        leaf, *later = leaves[ends[0] :]
        if isinstance(leaf, LastArguments) and self._untyped(leaf.value):
            leaf = leaf.value
        if not later and self._untyped(leaf) and isinstance(value, Text | LastArguments):
            return leaf  # the JSON text of this value ends at the end of the words
        if not all(map(is_independent, [*later, *keywords.values()])):
            return self.of("tojson", value, *keywords, *keywords.values(), text=True)
        independent = is_independent(value)
        before = self._symbols.of("tojson", value, *keywords, *keywords.values()) if independent else None
        rest: Value = Unknown()
        if self._untyped(leaf):
            rest = ""
        elif isinstance(leaf, LastArguments):
            rest = leaf.name
        elif isinstance(leaf, Text) and leaf.has_end:
            rest = leaf.rest
            if leaf is value and isinstance(rest, str) and not keywords:
                return Text((END, json.dumps(rest, ensure_ascii=False)[1:]), before)
        if not is_independent(rest):
            return Unknown(may_end=True, text=True)
        closing = self._symbols.of("json end", rest, *later, *keywords, *keywords.values())
        return Text((END, dataclasses.replace(closing, text=True, nonempty=True)), before)

    def _selected(self, values: GappedList | list[Value], wanted: bool, arguments: Sequence[Value]) -> Value:
        attribute, *test = arguments
        name, *against = test or ["truth"]
        kept = []
        for each in values.last_items if isinstance(values, GappedList) else values:
            found = self._dotted(each, attribute)
            passes = self.truth(found) if name == "truth" else self.tested(name, found, against)
            if not isinstance(passes, bool):
                return self.of("selected", values, *arguments)
            if passes is wanted:
                kept.append(each)
        return values.selected(kept) if isinstance(values, GappedList) else kept

    def _dotted(self, value: Value, name: Value) -> Value:
        if not isinstance(name, str):
            raise NotFollowed("an attribute that is not named")
        for part in name.split("."):
            value = self.item(value, part) if isinstance(value, dict) else self.attribute(value, part)
        return value

    # --- methods

    def method(self, value: Value, name: str, arguments: Sequence[Value]) -> Value:
        if is_concrete(value) and all(map(is_concrete, arguments)):
            return self.concrete(lambda: _read_now(self._environment.getattr(value, name)(*arguments)))
        match value:
            case PastMessage():
                return self._got(value.get, value.has, arguments) if name == "get" else Unknown()
            case dict() if name == "get" and all(map(is_concrete, value)):
                return self._got(value.__getitem__, value.__contains__, arguments)
            case LastArguments() if name == "items":
                return value.pairs
            case Text() if value.is_marked:
                return self._method_of_words(value, name, arguments)
        text = name in _TEXT_METHODS and not isinstance(value, dict)
        return self.of("method " + name, value, *arguments, text=text)

    def _got(
        self, get: Callable[[str], Value], has: Callable[[str], bool | Unknown], arguments: Sequence[Value]
    ) -> Value:
        """Return the result of the method `get` of a mapping."""
        key, otherwise = (*arguments, None)[:2]
        if not isinstance(key, str):
            return Unknown(may_end=True)
        found = has(key)
        if isinstance(found, bool):
            return get(key) if found else otherwise
        return Unknown(may_end=may_hold_end(otherwise))

    def _method_of_words(self, value: Text, name: str, arguments: Sequence[Value]) -> Value:
        """Call a method of a text in which the turn's words end.

        If `_words` is None, the words end in the sentinel, which has only lower-case letters and digits. So neither
        `strip` of other characters nor `lower` changes the sentinel, and a text with another character does not occur
        in it. No argument is expected to begin with the end of the sentinel.
        """
        rest = value.rest
        before = None if value.before is None else (name, *arguments, value.before)
        if self._words is not None and name in ("strip", "lstrip") and self._may_lose_begin(rest, name, arguments):
            return Unknown(
                may_end=True, text=True
            )  # blank words are removed, and then the text after them is stripped too
        if name == "lstrip":
            return dataclasses.replace(value, before=before)
        if self._words is not None and name in ("replace", "split") and rest != "":
            return Unknown(may_end=True, text=name == "replace")  # a match may begin in the words
        if isinstance(rest, str) and all(map(is_concrete, arguments)) and value.has_end:
            match name:
                case "strip" | "rstrip" if not _has_letters(arguments):
                    return after_end(rest.rstrip(*arguments), before)
                case "lower":
                    return after_end(rest.lower(), before)
                case "replace" if _is_no_word(arguments[0]):
                    return after_end(rest.replace(*arguments), before)
                case "split" if len(arguments) == 1 and _is_no_word(arguments[0]):
                    pieces = rest.split(*arguments)
                    last = after_end(pieces[0], before) if len(pieces) == 1 else pieces[-1]
                    return SplitText(last, independent=value.before is not None)
        elif name in ("strip", "rstrip") and is_independent(rest) and all(map(is_independent, arguments)):
            return Text((MAYBE_END, self._symbols.of("rstrip", rest, *arguments, text=True)))
        return self.of("method " + name, value, *arguments, text=name in _TEXT_METHODS)

    def _may_lose_begin(self, rest: Value, name: str, arguments: Sequence[Value]) -> bool:
        """Return True if `strip` may remove all words and then the beginning of the text after them."""
        if not all(map(is_concrete, arguments)):
            return True
        if isinstance(rest, str):
            kept = rest.rstrip(*arguments) if name == "strip" else rest
            return kept != kept.lstrip(*arguments)
        first = rest.parts[0] if isinstance(rest, Text) else rest
        return not isinstance(first, str) or not first.lstrip(*arguments) or first != first.lstrip(*arguments)


def _leaves(value: Value) -> Iterator[Value]:
    """Yield the leaves of a structure, in the order in which they are written."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _has_letters(arguments: Sequence[Value]) -> bool:
    """Return True if an argument is not a string, or is a string with letters or digits."""
    return any(not isinstance(each, str) or any(map(str.isalnum, each)) for each in arguments)


def _is_no_word(text: Value) -> bool:
    """Return True if a text is not empty and has a character that is neither a letter nor a digit."""
    return isinstance(text, str) and bool(text) and not text.isalnum()


_TEXT_FILTERS = frozenset(
    {"upper", "lower", "trim", "string", "capitalize", "title", "join", "indent", "replace", "format"}
)
_TEXT_METHODS = frozenset({"strip", "lstrip", "rstrip", "replace", "upper", "lower", "title", "capitalize", "format"})


def _read_now(value: Any) -> Any:
    """Convert a lazy result to a list, since a generator is empty when it is read a second time."""
    view = isinstance(value, type({}.items()) | type({}.keys()) | type({}.values()))
    return list(value) if view or hasattr(value, "__next__") else value
