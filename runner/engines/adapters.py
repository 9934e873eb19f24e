"""The LoRA adapters of an engine: which there are, which addition of each samples, and when an old one can go."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import BadOption, RequestRejected

__all__ = ["AdapterVersion", "Adapters", "base_and_adapter"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_STAMP = re.compile(r"(.*)\+([A-Za-z0-9][\w.-]*)@(\d+)", re.ASCII | re.DOTALL)


@dataclass(eq=False, slots=True)
class AdapterVersion:
    """One addition of an adapter."""

    name: str
    """The adapter's name."""
    number: int
    """Counts the additions under this name from 1; no number is given twice."""
    key: int
    """Counts the additions of all names from 1."""
    given: Path | None
    """The folder that was given; None where tensors were."""
    folder: Path | None = None
    """A copy of our own, which nobody writes over; None where the engine keeps none."""
    turns: int = 0
    """How many turns are being sampled with it."""

    @property
    def label(self) -> str:
        """What names this addition alone, in the weight versions of ids that were sampled with it: "poet@2"."""
        return f"{self.name}@{self.number}"


class Adapters:
    """The adapters of one engine, by name; changed by its trainer's calls alone, one change at a time.

    What is added under a name that is there already is a new version of it: later turns are sampled with that, turns
    in flight go on with theirs. So do turns in flight with an adapter that was removed. What no turn needs any more
    leaves the engine with the next change.

    This one has names only; a subclass loads what they stand for.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._keys = itertools.count(1)
        self._current = {name: AdapterVersion(_checked(name), 1, next(self._keys), None) for name in names}
        self._newest = dict.fromkeys(self._current, 1)  # kept for names that are gone, so that no label comes twice
        self._old: list[AdapterVersion] = []

    @property
    def folders(self) -> Mapping[str, Path | None]:
        """The adapters that can be asked for, and the folder that each was given as; None where tensors were."""
        return {name: version.given for name, version in self._current.items()}

    # --- for requests

    def check(self, request: str, adapter: str | None) -> None:
        """Return if a request may be sampled with this adapter.

        Raises:
            RequestRejected: there is none of that name; says which there are.
        """
        if adapter is not None and adapter not in self._current:
            raise RequestRejected(f"{request}: the engine has no adapter {adapter!r}; {self._there()}.")

    def take(self, request: str, adapter: str | None) -> AdapterVersion | None:
        """The version that samples this request; it stays until `leave`. None for the model as it is."""
        self.check(request, adapter)
        if adapter is None:
            return None
        version = self._current[adapter]
        version.turns += 1
        return version

    def leave(self, version: AdapterVersion | None) -> None:
        """The request that took it is over."""
        if version is not None:
            version.turns -= 1

    def lag(self, version: str) -> int:
        """How many additions of its adapter came after the one that this weight version names; 0 without one."""
        _, adapter, number = base_and_adapter(version)
        return max(0, self._newest.get(adapter, number) - number)

    # --- for the engine's control

    async def add(
        self, name: str, given: Any, *, config: Mapping[str, Any] | None = None, number: int | None = None
    ) -> str:
        """Add an adapter, or a new version of it; gives its label."""
        newest = self._newest.get(name, 0)
        if number is not None and number <= newest:
            raise BadOption(f"add_adapter({name!r}, number={number}): there was a {name}@{newest} already.")
        version = AdapterVersion(_checked(name), number or newest + 1, next(self._keys), _folder(given))
        await self.load(version, given, config)
        self._retire(name)
        self._current[name], self._newest[name] = version, version.number
        await self._unload_old()
        return version.label

    async def remove(self, name: str) -> None:
        """Take an adapter away; turns in flight go on with it.

        Raises:
            BadOption: there is none of that name.
            EngineDead: the engine died.
        """
        if name not in self._current:
            raise BadOption(f"remove_adapter({name!r}): the engine has no adapter of that name; {self._there()}.")
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
        return f"it has {', '.join(map(repr, self._current))}" if self._current else "it has none: add_adapter(...)"

    # --- how an engine does it

    async def load(self, version: AdapterVersion, given: Any, config: Mapping[str, Any] | None) -> None:
        """Bring an adapter into the engine; where it fails, nothing has changed."""

    async def unload(self, version: AdapterVersion) -> None:
        """Take it out of the engine again."""

    def close(self) -> None:
        """The engine is gone: give back what was kept for it."""
        self._current.clear()
        self._old.clear()


def _checked(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BadOption(f"adapter {name!r:.120}: its name has letters, digits, '_', '.' and '-', up to 100 of them.")
    return name


def _folder(given: Any) -> Path | None:
    return Path(given).expanduser().absolute() if isinstance(given, str | os.PathLike) else None


def base_and_adapter(version: str) -> tuple[str, str, int]:
    """A weight version in its parts: "7+poet@2" is ("7", "poet", 2), and "7" is ("7", "", 0)."""
    stamp = _STAMP.fullmatch(version)
    return (stamp[1], stamp[2], int(stamp[3])) if stamp is not None else (version, "", 0)
