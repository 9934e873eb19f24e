"""`deltarunner label`: labels and notes that people write about episodes."""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from runner.cli.report import make_console
from runner.errors import BadOption
from runner.report.labels import add_label, labels_path, read_labels
from runner.store.reader import RunFile
from runner.transcript import printable, printable_line

__all__ = ["label_command"]


def label_command(
    file: Path, episode: str | None, *, labels: Sequence[str], note: str | None, reader: str | None, remove: bool
) -> int:
    """Add, remove or list labels; return the exit code.

    Raises:
        BadOption: options are missing, do not belong together, or have an invalid value.
    """
    console = make_console()
    with RunFile(file) as run_file:
        if episode is None:
            if labels or note or remove:
                raise BadOption("label: give an episode as well: deltarunner label FILE EPISODE --label NAME.")
            found = read_labels(file)
            for id, several in found.by_episode.items():
                for each in several:
                    console.print(Text(f"{printable_line(id)}  {printable(each.words)}"), soft_wrap=True)
            for problem in found.problems:
                console.print(Text(printable(problem), "yellow"), soft_wrap=True)
            return 0
        run_file.row(episode)  # raises an error if the episode does not exist
    if remove == bool(labels or note):
        raise BadOption("label: give --label NAME, --note TEXT or both; or --remove alone.")
    for label in labels:
        if not label.strip() or "\n" in label:
            raise BadOption(f"--label {label!r:.60}: give a name of one line.")
    name = reader or os.environ.get("DELTARUNNER_READER") or _user()
    made = add_label(file, episode, labels=labels, note=note or "", reader=name)
    words = f"removed what {name} wrote about" if remove else f"{made.words} about"
    console.print(Text(f"{labels_path(file)}: {printable(words)} {printable_line(episode)}"), soft_wrap=True)
    return 0


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the account has no name, for example in a container
        return "reader"
