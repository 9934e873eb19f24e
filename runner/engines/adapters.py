"""LoRA adapters of an engine: their names, versions, and the turns that use each version."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import BadOption, RequestRejected

__all__ = ["AdapterVersion", "Adapters", "base_and_adapter", "is_adapter_name"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_STAMP = re.compile(r"(.*)\+([A-Za-z0-9][\w.-]*)@(\d+)", re.ASCII | re.DOTALL)


@dataclass(eq=False, slots=True)
class AdapterVersion:
    """One version of an adapter. Each `add` under the adapter's name creates a new version."""

    name: str
    """The adapter's name."""
    number: int
    """Number of this version, counted from 1 for each name; a number is never used twice."""
    key: int
    """Number of this version among the versions of all names, counted from 1."""
    given: Path | None
    """Folder that the caller gave; None for an adapter that was given as tensors or only by name."""
    folder: Path | None = None
    """Private copy of the folder, which no other program writes; None for an engine that keeps no copy."""
    turns: int = 0
    """Number of turns that are being sampled with this version."""

    @property
    def label(self) -> str:
        """Name of this version in the weight versions of its ids, such as "poet@2"."""
        return f"{self.name}@{self.number}"


class Adapters:
    """Adapters of one engine by name. Only the trainer's calls change them, one at a time.

    An adapter that is added under an existing name is a new version: later turns use it, and turns in flight keep
    theirs. Turns in flight also keep an adapter that was removed. An old version that no turn uses is unloaded at the
    next change.

    This class only records the adapters; a subclass loads them into its engine.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._keys = itertools.count(1)
        self._current = {name: AdapterVersion(_checked(name), 1, next(self._keys), None) for name in names}
        self._newest = dict.fromkeys(self._current, 1)  # removed names stay, since a label is never used twice
        self._old: list[AdapterVersion] = []

    @property
    def folders(self) -> Mapping[str, Path | None]:
        """Folder of each adapter that requests can name; None for an adapter without a folder."""
        return {name: version.given for name, version in self._current.items()}

    def stamp(self, adapter: str | None) -> str:
        """Return the suffix of an adapter in a weight version, such as "+poet@2"; "" for None or an unknown name."""
        version = self._current.get(adapter or "")
        return "" if version is None else f"+{version.label}"

    # --- for requests

    def check(self, request: str, adapter: str | None) -> None:
        """Check that a request may name this adapter.

        Raises:
            RequestRejected: the engine has no adapter of that name; the message lists its adapters.
        """
        if adapter is not None and adapter not in self._current:
            raise RequestRejected(f"{request}: the engine has no adapter {adapter!r}; {self._there()}.")

    def take(self, request: str, adapter: str | None) -> AdapterVersion | None:
        """Return the adapter version for a request, and count the request in the version's `turns` until `leave`.

        Returns:
            The version; None if the request uses the model without an adapter.

        Raises:
            RequestRejected: the engine has no adapter of that name.
        """
        self.check(request, adapter)
        if adapter is None:
            return None
        version = self._current[adapter]
        version.turns += 1
        return version

    def leave(self, version: AdapterVersion | None) -> None:
        """Remove a turn from the count that `take` increased."""
        if version is not None:
            version.turns -= 1

    def lag(self, version: str) -> int:
        """Return the number of an adapter's newest version, minus the number of its version in `version`; at least 0.

        For "7+poet@2" the result is 1 if the newest version is "poet@3". For "7", without an adapter, it is 0.
        """
        _, adapter, number = base_and_adapter(version)
        return max(0, self._newest.get(adapter, number) - number)

    # --- for the engine's control

    async def add(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        """Add an adapter, or a new version of it, and return the label of the version.

        Raises:
            BadOption: the name is invalid, or `number` is not higher than the newest version's number.
            Exception: `load` failed; the adapters are unchanged.
        """
        newest = self._newest.get(name, 0)
        if number is not None and number <= newest:
            raise BadOption(
                f"add_adapter({name!r}, number={number}): {name}@{newest} exists already: give a higher number."
            )
        version = AdapterVersion(_checked(name), number or newest + 1, next(self._keys), _folder(given))
        await self.load(version, given, config)
        self._retire(name)
        self._current[name], self._newest[name] = version, version.number
        await self._unload_old()
        return version.label

    async def remove(self, name: str) -> None:
        """Remove an adapter; turns in flight keep it.

        Raises:
            BadOption: the engine has no adapter of that name.
            EngineDead: the engine died.
        """
        if name not in self._current:
            there = self._there() if self._current else "it has none, so there is nothing to remove"
            raise BadOption(f"remove_adapter({name!r}): the engine has no adapter of that name; {there}.")
        self._retire(name)
        await self._unload_old()

    def _retire(self, name: str) -> None:
        version = self._current.pop(name, None)
        if version is not None:
            self._old.append(version)

    async def _unload_old(self) -> None:
        for version in [version for version in self._old if not version.turns]:
            await self.unload(version)
            self._old.remove(version)

    def _there(self) -> str:
        return f"it has {', '.join(map(repr, self._current))}" if self._current else "it has none: use add_adapter()"

    # --- for subclasses

    async def load(self, version: AdapterVersion, given: Any, config: Mapping[str, Any] | None) -> None:
        """Load an adapter into the engine; a failure changes nothing."""

    async def unload(self, version: AdapterVersion) -> None:
        """Unload an adapter from the engine."""

    def close(self) -> None:
        """Free the resources that were kept for the engine, after its end."""
        self._current.clear()
        self._old.clear()


def is_adapter_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _checked(name: str) -> str:
    if not is_adapter_name(name):
        raise BadOption(f"adapter {name!r:.120}: give a name of up to 100 letters, digits, '_', '.' and '-'.")
    return name


def _folder(given: Any) -> Path | None:
    return Path(given).expanduser().absolute() if isinstance(given, str | os.PathLike) else None


def base_and_adapter(version: str) -> tuple[str, str, int]:
    """Split a weight version: "7+poet@2" is ("7", "poet", 2), and "7" is ("7", "", 0)."""
    stamp = _STAMP.fullmatch(version)
    return (stamp[1], stamp[2], int(stamp[3])) if stamp is not None else (version, "", 0)
