"""Labels and notes of readers about episodes, in a file beside the run file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from runner.errors import StorageFailed

__all__ = ["Label", "Labels", "add_label", "labels_path", "read_labels"]

MAX_NOTE_CHARS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Label:
    """The labels and the note of one reader about one episode."""

    episode: str
    labels: tuple[str, ...]
    note: str
    reader: str
    time: str
    """The time in UTC, in ISO 8601."""

    @property
    def words(self) -> str:
        """The labels, the note and the reader as one text."""
        parts = [", ".join(self.labels), self.note]
        return f"{': '.join(part for part in parts if part)} ({self.reader})"


def labels_path(run_file: Path) -> Path:
    """The path of the labels of a run file: `calculator-001.labels.jsonl` beside `calculator-001.db`."""
    return run_file.with_name(f"{run_file.stem}.labels.jsonl")


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels and notes beside a run file."""

    by_episode: Mapping[str, Sequence[Label]]
    """The labels of each episode, one per reader: a later line of a reader replaces the earlier ones."""
    problems: tuple[str, ...]
    """Messages about damaged lines, which are left out, or about a file that cannot be read."""

    def of(self, episode: str) -> Sequence[Label]:
        """The labels of an episode."""
        return self.by_episode.get(episode, ())

    def with_text(self, text: str) -> list[str]:
        """The ids of the episodes whose labels, notes or readers contain a text; upper and lower case are equal."""
        found = text.lower()
        return [id for id, several in self.by_episode.items() if any(found in each.words.lower() for each in several)]


def read_labels(run_file: Path) -> Labels:
    """The labels beside a run file; empty without a file of labels. Faults are in `problems`, and are not raised."""
    path = labels_path(run_file)
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return Labels({}, ())
    except OSError as error:
        return Labels({}, (f"the labels in {path} cannot be read ({error}).",))
    problems = []
    last: dict[tuple[str, str], Label] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            label = _parsed(line)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            problems.append(f"labels {path}: line {number} is damaged and left out ({error!s:.200}).")
            continue
        last.pop((label.episode, label.reader), None)
        last[label.episode, label.reader] = label
    found: dict[str, list[Label]] = {}
    for label in last.values():
        if label.labels or label.note:  # a line without labels and note removes the reader's earlier labels
            found.setdefault(label.episode, []).append(label)
    return Labels(found, tuple(problems))


def _parsed(line: bytes) -> Label:
    fields = json.loads(line)
    label = Label(**{**fields, "labels": tuple(fields["labels"])})
    if not all(isinstance(text, str) for text in (*label.labels, label.episode, label.note, label.reader)):
        raise TypeError("a field is not text")
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
        # The line is appended to the file with one write, so that the lines of two readers do not mix.
        with path.open("a+b", buffering=0) as file:
            # If the last line is incomplete, the new line must not continue it.
            cut_off = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
            file.write(b"\n" * cut_off + f"{json.dumps(asdict(label))}\n".encode())
    except OSError as error:
        raise StorageFailed(
            f"labels cannot be written to {path} ({error.strerror}): make the file writable, and free space."
        ) from error
    return label
