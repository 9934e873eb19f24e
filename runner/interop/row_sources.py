"""Rows of data sets, read as they are needed: JSONL, CSV and Parquet files, Hugging Face data, Python objects."""

from __future__ import annotations

import csv
import itertools
import json
import random
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from runner.errors import BadOption, BadTask, first_line
from runner.interop.packages import optional_package
from runner.interop.row_fields import Row

__all__ = ["RowSource", "source_of"]

BATCH_ROWS = 256
"""Number of rows of a Parquet file that are decoded at once."""
MIN_SHUFFLED_ROWS = 10_000
"""Minimum number of rows of a Parquet file that are shuffled together. There are fewer if no other rows are left, or if
more rows would exceed `MAX_SHUFFLED_BYTES`.
"""
MAX_SHUFFLED_BYTES = 256 << 20
"""Maximum uncompressed size of the row groups that are shuffled together. A larger row group is shuffled in parts."""
READ_BYTES = 1 << 20
"""Size of the read buffer of a Parquet column."""


class RowSource(ABC):
    """A data set that is read row by row."""

    name: str

    def check_columns(self, needed: Iterable[str]) -> None:
        """Check that all needed columns exist, before a row is read. If the columns are unknown, check nothing.

        Raises:
            BadTask: a column is missing; the message lists the existing columns.
        """
        known = self.columns()
        missing = [] if known is None else sorted(set(needed) - set(known))
        if known is not None and missing:
            raise BadTask(f"{self.name}: there is no field {missing[0]!r}; the fields are {', '.join(known)}.")

    def columns(self) -> Sequence[str] | None:
        """The names of all columns; None if rows may have different columns."""
        return None

    @abstractmethod
    def rows(self, needed: Sequence[str], seed: int | None) -> Iterator[tuple[int, Row]]:
        """The rows, each with its number, from 1.

        Args:
            needed: the columns that are used; others may be left out.
            seed: the seed of a shuffled order; None for the order of the data set.

        Raises:
            BadTask: a row cannot be read.
        """


def source_of(tasks: Any) -> RowSource:
    """Return the source for a path, `hf:NAME[SPLIT]`, or an iterable of mappings.

    Raises:
        BadTask: the file is missing, is a folder, or has an unknown format.
        BadOption: `tasks` is another kind of object, or the text after "hf:" is invalid.
    """
    if isinstance(tasks, str) and tasks.startswith("hf:"):
        return _HubRows(tasks)
    if isinstance(tasks, str | Path):
        return _file_source(Path(tasks))
    if not isinstance(tasks, Iterable):
        raise BadOption(f"tasks={tasks!r:.60}: give a file, hf:NAME[SPLIT], or a list of rows.")
    return _ObjectRows(tasks)


def _file_source(path: Path) -> RowSource:
    kinds: Mapping[str, type[_FileRows]] = {
        ".jsonl": _JsonRows,
        ".ndjson": _JsonRows,
        ".json": _JsonRows,
        ".csv": _CsvRows,
        ".tsv": _CsvRows,
        ".parquet": _ParquetRows,
    }
    if path.is_dir():
        raise BadTask(f"{str(path)!r} is a folder: give a file, or hf:{path} for a folder of the datasets library.")
    if not path.is_file():
        raise BadTask(f"the data set {str(path)!r} does not exist: give a JSONL, CSV or Parquet file, or hf:NAME.")
    kind = kinds.get(path.suffix.lower())
    if kind is None:
        raise BadTask(f"{str(path)!r}: the kind {path.suffix!r} is unknown: give {', '.join(kinds)}, or hf:NAME.")
    return kind(path)


class _ObjectRows(RowSource):
    """Rows in a Python iterable of mappings. To shuffle an iterable without indices, all rows are kept in memory."""

    def __init__(self, tasks: Iterable[Any]) -> None:
        self.name = f"the {type(tasks).__name__}"
        self._tasks = tasks

    def rows(self, needed: Sequence[str], seed: int | None) -> Iterator[tuple[int, Row]]:
        """The rows, with all their fields."""
        if seed is None:
            numbered: Iterable[tuple[int, Any]] = enumerate(self._tasks, 1)
        else:
            given: Any = self._tasks
            known = given if hasattr(given, "__getitem__") and hasattr(given, "__len__") else list(given)
            numbered = ((number + 1, known[number]) for number in _order(len(known), seed))
        for number, row in numbered:
            if not isinstance(row, Mapping):
                raise BadTask(f"row {number}: {row!r:.60} is not a mapping: give a dict of fields and values.")
            yield number, row


class _FileRows(RowSource):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def _error(self, error: OSError) -> BadTask:
        return BadTask(f"the data set {self.name!r} cannot be read ({error.strerror or error}): give a readable file.")


class _JsonRows(_FileRows):
    """One JSON object per line."""

    def rows(self, needed: Sequence[str], seed: int | None) -> Iterator[tuple[int, Row]]:
        """The rows with their line numbers. For a shuffled order, the positions of all lines are read first."""
        try:
            with self.path.open("rb") as file:
                lines = enumerate(file, 1) if seed is None else self._shuffled(file, seed)
                for number, line in lines:
                    if line.strip():
                        yield number, self._row(number, line)
        except OSError as error:
            raise self._error(error) from error

    def _shuffled(self, file: BinaryIO, seed: int) -> Iterator[tuple[int, bytes]]:
        starts = array("q", itertools.accumulate((len(line) for line in file), initial=0))[:-1]
        for number in _order(len(starts), seed):
            file.seek(starts[number])
            yield number + 1, file.readline()

    def _row(self, number: int, line: bytes) -> Row:
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            fix = " Write each row on its own line, without a list around them." if line.strip()[:1] == b"[" else ""
            raise BadTask(f"{self.name}:{number}: this line is not JSON ({error}): correct it.{fix}") from None
        if not isinstance(row, dict):
            raise BadTask(f"{self.name}:{number}: a row must be a JSON object, not a {type(row).__name__}.")
        return row


class _CsvRows(_FileRows):
    """Values separated by commas (or tabs, in .tsv files), with a first line of names; all values are text."""

    def columns(self) -> Sequence[str]:
        """The names in the first line."""
        try:
            with self.path.open("rb") as file:
                return self._header(_CountedLines(file))
        except OSError as error:
            raise self._error(error) from error

    def rows(self, needed: Sequence[str], seed: int | None) -> Iterator[tuple[int, Row]]:
        """The rows. For a shuffled order, the positions of all rows are read first."""
        try:
            with self.path.open("rb") as file:
                lines = _CountedLines(file)
                names = self._header(lines)
                if seed is None:
                    yield from ((number, self._row(number, names, row)) for number, row in self._records(lines))
                    return
                starts = self._starts(lines)
                for number in _order(len(starts), seed):
                    file.seek(starts[number])
                    _, row = next(self._records(_CountedLines(file)))
                    yield number + 1, self._row(number + 1, names, row)
        except OSError as error:
            raise self._error(error) from error
        except (UnicodeDecodeError, csv.Error) as error:
            raise BadTask(f"{self.name}: not CSV in UTF-8 ({error}): convert the file.") from None

    def _starts(self, lines: _CountedLines) -> array[int]:
        starts, start = array("q"), lines.bytes
        for _ in self._records(lines):
            starts.append(start)
            start = lines.bytes
        return starts

    def _records(self, lines: _CountedLines) -> Iterator[tuple[int, list[str]]]:
        delimiter = "\t" if self.path.suffix.lower() == ".tsv" else ","
        filled = (row for row in csv.reader(lines, delimiter=delimiter, strict=True) if row)
        return enumerate(filled, 1)

    def _header(self, lines: _CountedLines) -> list[str]:
        try:
            _, names = next(self._records(lines), (0, []))
        except (UnicodeDecodeError, csv.Error) as error:
            raise BadTask(f"{self.name}: not CSV in UTF-8 ({error}): convert the file.") from None
        if not names or len(set(names)) < len(names):
            problem = f"repeats a name: {', '.join(names)}: rename one" if names else "is missing: add this line"
            raise BadTask(f"{self.name}: the first line, with the names of the fields, {problem}.")
        return names

    def _row(self, number: int, names: list[str], values: list[str]) -> Row:
        if len(values) != len(names):
            raise BadTask(f"{self.name}: row {number} has {len(values)} values for {len(names)} fields: correct it.")
        return dict(zip(names, values, strict=True))


class _CountedLines:
    """Decoded lines of a file, with the number of bytes that were read so far."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.bytes = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._file.readline()
        if not line:
            raise StopIteration
        first, self.bytes = self.bytes == 0, self.bytes + len(line)
        return line.decode("utf-8-sig" if first else "utf-8")


class _ParquetRows(_FileRows):
    """A Parquet file. Only the columns in use are read, in small batches.

    For a shuffled order, row groups are drawn until they have `MIN_SHUFFLED_ROWS` rows, or until the next group would
    exceed `MAX_SHUFFLED_BYTES`. Then the rows of these groups are shuffled. A row group above `MAX_SHUFFLED_BYTES` is
    shuffled in consecutive parts, so that memory stays bounded.
    """

    def columns(self) -> Sequence[str]:
        """The names in the file's schema."""
        with self._opened() as file:
            return list(file.schema_arrow.names)

    def rows(self, needed: Sequence[str], seed: int | None) -> Iterator[tuple[int, Row]]:
        """The rows, with only the needed columns."""
        import pyarrow as pa

        known = set(self.columns())
        wanted = [name for name in needed if name in known]
        try:
            with self._opened() as file:
                if seed is None:
                    batches = file.iter_batches(BATCH_ROWS, columns=wanted, use_threads=False)
                    yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
                else:
                    yield from self._shuffled(file, wanted, seed)
        except (pa.ArrowException, OSError) as error:
            raise BadTask(f"{self.name}: the Parquet file cannot be read ({error!s:.200}): write it again.") from None

    def _opened(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(self.path, buffer_size=READ_BYTES, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise BadTask(f"{self.name}: this is not a Parquet file ({error!s:.200}): give a Parquet file.") from None

    def _shuffled(self, file: Any, columns: list[str], seed: int) -> Iterator[tuple[int, Row]]:
        rng = random.Random(f"shuffle {seed}")
        for table, numbers in _windows(file, columns, rng):
            for place in _order(len(numbers), rng.random()):
                yield numbers[place], table.slice(place, 1).to_pylist()[0]


def _windows(file: Any, columns: list[str], rng: random.Random) -> Iterator[tuple[Any, Sequence[int]]]:
    """Yield the rows that are shuffled together, as pairs of a table and the numbers of its rows in the file."""
    counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    sizes = [_bytes_of(file.metadata.row_group(group), columns) for group in range(file.num_row_groups)]
    starts = list(itertools.accumulate(counts, initial=1))
    groups = list(range(len(counts)))
    rng.shuffle(groups)
    while groups:
        if sizes[groups[-1]] > MAX_SHUFFLED_BYTES:
            group = groups.pop()
            yield from _parts(file, columns, group, starts[group])
            continue
        window: list[int] = []
        while groups and sum(counts[group] for group in window) < MIN_SHUFFLED_ROWS:
            if sum(sizes[group] for group in (*window, groups[-1])) > MAX_SHUFFLED_BYTES:
                break
            window.append(groups.pop())
        table = file.read_row_groups(window, columns=columns, use_threads=False)
        yield table, [number for group in window for number in range(starts[group], starts[group + 1])]


def _parts(file: Any, columns: list[str], group: int, start: int) -> Iterator[tuple[Any, Sequence[int]]]:
    """Yield parts of a large row group, in order, in the form of `_windows`; `start` is the number of its first row."""
    import pyarrow as pa

    part: list[Any] = []
    for batch in file.iter_batches(BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
        part.append(batch)
        count = sum(each.num_rows for each in part)
        if count >= MIN_SHUFFLED_ROWS or sum(each.nbytes for each in part) >= MAX_SHUFFLED_BYTES:
            yield pa.Table.from_batches(part), range(start, start + count)
            part, start = [], start + count
    if part:
        yield pa.Table.from_batches(part), range(start, start + sum(each.num_rows for each in part))


def _bytes_of(group: Any, columns: list[str]) -> int:
    """The uncompressed size of the columns of a row group, from the file's metadata."""
    chunks = [group.column(number) for number in range(group.num_columns)]
    return sum(each.total_uncompressed_size for each in chunks if each.path_in_schema.split(".")[0] in columns)


def _order(count: int, seed: float) -> array[int]:
    """The numbers from 0 to `count` - 1 in a random order, stored in eight bytes each."""
    order = array("q", range(count))
    random.Random(f"shuffle {seed}").shuffle(order)
    return order


_HUB_NAME: Final = re.compile(r"hf:(?P<name>[^\[\]:]+)(?::(?P<config>[^\[\]:]+))?(?:\[(?P<split>[^\[\]]+)\])?")


class _HubRows(RowSource):
    """The rows of `hf:NAME[SPLIT]`, `hf:NAME:CONFIG[SPLIT]`, or `hf:FOLDER[SPLIT]`.

    The library `datasets` maps the rows into memory. If the name has no split, the data set must not have several. A
    slice such as `[train[:100]]` is not supported: use `take`.
    """

    def __init__(self, text: str) -> None:
        found = _HUB_NAME.fullmatch(text)
        if found is None:
            raise BadOption(f"{text!r:.80}: write hf:NAME[SPLIT], hf:NAME:CONFIG[SPLIT] or hf:FOLDER[SPLIT].")
        self.name = text
        self._where, self._config, self._split = found["name"], found["config"], found["split"]
        self._opened: Any = None

    def columns(self) -> Sequence[str]:
        """The names in the data set's features."""
        return list(self._open().column_names)

    def rows(self, needed: Sequence[str], seed: int | None) -> Iterator[tuple[int, Row]]:
        """The rows, with only the needed columns; images, sounds and videos are not decoded."""
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
            # The library raises its own errors, and errors of its network and file libraries.
            raise BadTask(
                f"{self.name}: the data set cannot be loaded ({first_line(error):.300}): give one that "
                "datasets.load_dataset() loads."
            ) from error

    def _one_split(self, loaded: Any) -> Any:
        if not isinstance(loaded, Mapping):
            if self._split is not None:
                raise BadTask(f"{self.name}: this data set has no splits: leave out [{self._split}].")
            return loaded
        if self._split in loaded:
            return loaded[self._split]
        if self._split is None and len(loaded) == 1:
            return next(iter(loaded.values()))
        wanted = "give the split after the name" if self._split is None else f"there is no split {self._split!r}"
        raise BadTask(f"{self.name}: {wanted}; the splits are {', '.join(f'[{name}]' for name in loaded)}.")
