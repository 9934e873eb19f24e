"""Cache of recent histories that were read, since clients send the same history again and again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, count
from typing import Any, Final, Generic, TypeVar

from runner.messages import canonical_json

__all__ = ["MAX_RECENT_HISTORIES", "HistoryCache"]

T = TypeVar("T")

MAX_RECENT_HISTORIES: Final = 8
"""Maximum number of recent histories in each cache of an episode, so that several active clients each have one."""


class HistoryCache(Generic[T]):
    """Reader of histories. If a recent history is similar, only the items that differ from it are read.

    Equal items are compared by loops in C. Several threads may use the cache.
    """

    def __init__(self) -> None:
        self._recent: tuple[_CachedHistory[T], ...] = ()  # the most recent one comes first

    def read(self, items: Sequence[Any], read_item: Callable[[int, Any], T]) -> list[T]:
        """Read a history, and return the result for each item.

        Args:
            items: the items of the history, which the caller may change afterwards.
            read_item: function that reads an item, given its index and the item. Its result must depend only on the
                JSON of the item.
        """
        *_, read = self.steps(items, read_item)
        return read

    def steps(self, items: Sequence[Any], read_item: Callable[[int, Any], T]) -> Iterator[list[T]]:
        """Read a history as `read` does, and yield after each item that is read; at the end, yield the result."""
        before = self._similar_to(items)
        history = before.cut(len(items))
        for index in compress(count(), map(operator.ne, history.items, items)):
            history.read[index], history.items[index] = read_item(index, items[index]), _copied(items[index])
            yield history.read
        for index in range(len(history.read), len(items)):
            history.add(items[index], read_item(index, items[index]))
            yield history.read
        self._keep(history, before)
        yield list(history.read)

    def read_on(
        self, items: Sequence[Any], read_item: Callable[[int, Any], T], is_complete: Callable[[T], bool]
    ) -> list[T]:
        """Read a history in which the result for an item may depend on earlier items.

        If the result for an item is complete, later results must not depend on this item or on earlier ones. So reading
        begins after the last complete result before the first item that differs.
        """
        before = self._similar_to(items)
        same = min(len(before.items), len(items))
        same = next(compress(count(), map(operator.ne, before.items, items)), same)
        while same and not is_complete(before.read[same - 1]):
            same -= 1
        history = before.cut(same)
        for index in range(same, len(items)):
            history.add(items[index], read_item(index, items[index]))
        self._keep(history, before)
        return list(history.read)

    def _similar_to(self, items: Sequence[Any]) -> _CachedHistory[T]:
        for each in self._recent:
            if each.is_similar(items):
                return each
        return _CachedHistory([], [])

    def _keep(self, history: _CachedHistory[T], before: _CachedHistory[T]) -> None:
        others = [each for each in self._recent if each is not before]
        self._recent = (history, *others[: MAX_RECENT_HISTORIES - 1])


@dataclass(slots=True, eq=False)
class _CachedHistory(Generic[T]):
    """A history that was read."""

    items: list[Any]
    """Copies of the history's items. A copy equals only items with the same JSON."""
    read: list[T]
    """The result for each item."""

    def add(self, item: Any, read: T) -> None:
        """Append a copy of an item, and the result of reading it."""
        self.items.append(_copied(item))
        self.read.append(read)

    def cut(self, length: int) -> _CachedHistory[T]:
        """Return a copy with the first `length` items."""
        return _CachedHistory(self.items[:length], self.read[:length])

    def is_similar(self, items: Sequence[Any]) -> bool:
        """Return True if `items` are probably this history, perhaps extended, cut, or with cache marks on other items.

        Two neighbouring items near the end are compared, since a single item, such as "Continue.", may be in any
        history.
        """
        end = min(len(self.items), len(items))
        ends = (end, end - 1, end - 2)
        return any(self.items[max(0, at - 2) : at] == list(items[max(0, at - 2) : at]) for at in ends if at > 0)


class _Spelled:
    """A JSON value that equals only values with the same JSON text, although True, 1 and 1.0 are equal in Python."""

    __slots__ = ("_json",)

    def __init__(self, value: Any) -> None:
        self._json = canonical_json(value)

    def __eq__(self, other: object) -> bool:
        return self._json == canonical_json(other)

    __hash__ = None  # type: ignore[assignment]  # equal values may have other JSON, and no value is a key


_PLAIN: Final = frozenset({str, type(None), list, dict})


def _copied(value: Any) -> Any:
    """Return a copy that equals only the same JSON; an object of plain values may have its keys in any order."""
    if value is None or type(value) is str:
        return value
    if type(value) is list and _PLAIN.issuperset(map(type, value)):
        return [_copied(each) for each in value]
    if type(value) is dict and {str}.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values())):
        return {key: _copied(each) for key, each in value.items()}
    return _Spelled(value)
