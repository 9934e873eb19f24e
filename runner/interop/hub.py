"""Data sets of the library `datasets`: local folders, and names of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from runner.errors import BadOption, BadTask, first_line
from runner.interop.packages import optional_package
from runner.interop.row_fields import Row
from runner.interop.row_sources import RowSource

__all__ = ["HubRows"]

_NAME: Final = re.compile(r"hf:(?P<name>[^\[\]:]+)(?::(?P<config>[^\[\]:]+))?(?:\[(?P<split>[^\[\]]+)\])?")


class HubRows(RowSource):
    """The rows of `hf:NAME[SPLIT]`, `hf:NAME:CONFIG[SPLIT]`, or `hf:FOLDER[SPLIT]`; memory-mapped by the library.

    Without a split, the data set must have only one. A slice such as `[train[:100]]` is not supported: use `take`.
    """

    def __init__(self, text: str) -> None:
        found = _NAME.fullmatch(text)
        if found is None:
            raise BadOption(f"{text!r:.80}: write hf:NAME[SPLIT], hf:NAME:CONFIG[SPLIT] or hf:FOLDER[SPLIT].")
        self.name = text
        self._where, self._config, self._split = found["name"], found["config"], found["split"]
        self._opened: Any = None

    def columns(self) -> Sequence[str]:
        """The names in the data set's features."""
        return list(self._open().column_names)

    def rows(self, needed: Sequence[str], seed: int | None) -> Iterator[tuple[int, Row]]:
        """The rows; images are not decoded."""
        rows = self._open().select_columns([name for name in needed if name in self._open().column_names])
        rows = rows.with_format(None)
        for name, feature in rows.features.items():
            if hasattr(feature, "decode") and type(feature).__name__ in ("Image", "Audio", "Video"):
                rows = rows.cast_column(name, type(feature)(decode=False))
        if seed is not None:
            order = rows.shuffle(seed=seed % (1 << 32), keep_in_memory=True)
            numbers = order._indices.column(0).to_numpy() if order._indices is not None else range(len(order))
            yield from ((int(numbers[place]) + 1, row) for place, row in enumerate(order))
            return
        yield from enumerate(rows, 1)

    def _open(self) -> Any:
        if self._opened is None:
            self._opened = self._one_split(self._load())
        return self._opened

    def _load(self) -> Any:
        datasets = optional_package("datasets", extra="datasets", least="3")
        folder = Path(self._where)
        try:
            if folder.is_dir() and any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
                return datasets.load_from_disk(str(folder))
            return datasets.load_dataset(self._where, self._config)
        except Exception as error:
            # The library raises errors of many libraries: of the network, of files, of its own.
            raise BadTask(f"{self.name}: the data set cannot be loaded ({first_line(error):.300}).") from error

    def _one_split(self, loaded: Any) -> Any:
        if not isinstance(loaded, Mapping):
            if self._split is not None:
                raise BadTask(f"{self.name}: this data set has no splits: leave out [{self._split}].")
            return loaded
        if self._split in loaded:
            return loaded[self._split]
        if self._split is None and len(loaded) == 1:
            return next(iter(loaded.values()))
        wanted = "give the split" if self._split is None else f"there is no split {self._split!r}"
        raise BadTask(f"{self.name}: {wanted}; the splits are {', '.join(f'[{name}]' for name in loaded)}.")
