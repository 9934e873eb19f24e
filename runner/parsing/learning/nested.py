"""Learns a notation of a template's own for lists and objects, from four renders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runner.parsing.notations import Nested

__all__ = ["learn_nested"]


def learn_nested(body: Callable[[Any], str | None], before: str) -> Nested | None:
    """The notation, or None where values are written in none that this form describes.

    Args:
        body: what the template writes between a key and what separates its value from the next one.
        before: how each of those begins, whatever the value.
    """
    texts = [
        body(value)
        for value in ([70707, 80808], [True, False, None, "zqitemz"], {"zqaz": 70707, "zqbz": 80808}, {}, [])
    ]
    if any(text is None or not text.startswith(before) for text in texts):
        return None
    numbers, words, members, no_members, no_items = (text[len(before) :] for text in texts if text is not None)
    open_list, _, rest = numbers.partition("70707")
    item, _, close_list = rest.partition("80808")
    if no_items != open_list + close_list or not item:
        return None
    listed = words[len(open_list) : len(words) - len(close_list)].split(item)
    if len(listed) != 4 or "zqitemz" not in listed[3]:
        return None
    open_string, _, close_string = listed[3].partition("zqitemz")
    opened, _, rest = members.partition("zqaz")
    colon, _, rest = rest.partition("70707")
    between, _, rest = rest.partition("zqbz")
    colon_again, _, close_object = rest.partition("80808")
    open_object = no_members[: len(no_members) - len(close_object)]
    open_key = opened[len(open_object) :]
    if colon != colon_again or not opened.startswith(open_object) or not between.endswith(open_key):
        return None
    member = between[: len(between) - len(open_key)]
    backwards = body({"zqbz": 80808, "zqaz": 70707})
    return Nested(
        open_object, colon, member, close_object, open_list, item, close_list, open_string, close_string,
        open_key, "", listed[0], listed[1], listed[2], backwards == texts[2],
    )  # fmt: skip
