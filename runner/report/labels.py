"""Labels and notes of readers about episodes, in a file beside the run file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runner.errors import RunFileError, StorageFailed

__all__ = ["Label", "add_label", "labels_path", "read_labels"]

MAX_NOTE_CHARS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Label:
    """The labels and the note of one reader about one episode."""

    episode: str
    """The id of the episode."""
    labels: tuple[str, ...]
    note: str
    reader: str
    time: str
    """The time in UTC, in ISO 8601."""

    @property
    def words(self) -> str:
        """The labels, the note and the reader on one line or several."""
        parts = [", ".join(self.labels), self.note]
        return f"{': '.join(part for part in parts if part)} ({self.reader})"


def labels_path(run_file: Path) -> Path:
    """The path of the labels of a run file: `calculator-001.labels.jsonl` beside `calculator-001.db`."""
    return run_file.with_name(f"{run_file.stem}.labels.jsonl")


def read_labels(run_file: Path) -> dict[str, list[Label]]:
    """The labels by episode, one of each reader: the last line of a reader replaces the ones before.

    Raises:
        RunFileError: a line is damaged.
    """
    path = labels_path(run_file)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"labels {path}: they cannot be read ({error}).") from error
    last: dict[tuple[str, str], Label] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            label = _parsed(path, number, line)
            last.pop((label.episode, label.reader), None)
            last[label.episode, label.reader] = label
    found: dict[str, list[Label]] = {}
    for label in last.values():
        if label.labels or label.note:  # a line without either removes
            found.setdefault(label.episode, []).append(label)
    return found


def _parsed(path: Path, number: int, line: str) -> Label:
    try:
        fields = json.loads(line)
        label = Label(**{**fields, "labels": tuple(fields["labels"])})
        if not all(isinstance(text, str) for text in (*label.labels, label.episode, label.note, label.reader)):
            raise TypeError("a field is not text")
    except (ValueError, TypeError, KeyError) as error:
        raise RunFileError(f"labels {path}: line {number} is damaged ({error}). Remove or repair it.") from error
    return label


def add_label(run_file: Path, episode: str, *, labels: Sequence[str], note: str, reader: str) -> Label:
    """Add a reader's labels and note about an episode, which replace the reader's earlier ones.

    Raises:
        StorageFailed: the file beside the run file cannot be written.
    """
    label = Label(
        episode, tuple(labels), note[:MAX_NOTE_CHARS], reader, datetime.now(UTC).isoformat(timespec="seconds")
    )
    path = labels_path(run_file)
    try:
        # One write to the end of the file: two readers do not mix their lines.
        with path.open("ab", buffering=0) as file:
            file.write(f"{json.dumps(asdict(label))}\n".encode())
    except OSError as error:
        raise StorageFailed(f"labels {path}: they cannot be written ({error.strerror}).") from error
    return label
