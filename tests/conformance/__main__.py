"""`python -m tests.conformance`: play the corpus and print the tables. `--write` saves them in docs/conformance.md.

With `--formats`, the tables show how templates write calls and thoughts, for docs/tool-formats.md.
"""

from __future__ import annotations

import argparse

from tests.conformance import record, shown, turn_formats
from tests.conformance.real import play_all
from tests.conformance.report import faults, page
from tests.conformance.sweep import sweep
from tests.repository import DOCS

PAGE = DOCS / "conformance.md"
FORMATS_PAGE = DOCS / "tool-formats.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}, and the record beside the tests")
    parser.add_argument("--processes", type=int, default=2, help="how many share the work")
    parser.add_argument("--formats", action="store_true", help="learn the formats of turns instead")
    options = parser.parse_args()
    if options.formats:
        rows = turn_formats.learn_all(options.processes)
        print(turn_formats.page(rows))
        if options.write:
            turn_formats.write(rows)
            FORMATS_PAGE.write_text(turn_formats.page(rows), encoding="utf-8")
        return
    outcomes = sweep(processes=options.processes)
    tallies = play_all(processes=options.processes)
    text = page(outcomes, tallies, shown.look_all(options.processes))
    print(text)
    print("\n".join(faults(outcomes, tallies)))
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
        record.write(record.rows_of(outcomes, processes=options.processes))


if __name__ == "__main__":
    main()
