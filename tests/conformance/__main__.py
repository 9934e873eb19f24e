"""`python -m tests.conformance`: play the corpus, print the tables; `--write` keeps them in docs/conformance.md."""

from __future__ import annotations

import argparse

from tests.conformance import record
from tests.conformance.real import play_all
from tests.conformance.report import faults, page
from tests.conformance.sweep import sweep
from tests.repository import DOCS

PAGE = DOCS / "conformance.md"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}, and the record beside the tests")
    parser.add_argument("--processes", type=int, default=2, help="how many share the work")
    options = parser.parse_args()
    outcomes = sweep(processes=options.processes)
    tallies = play_all(processes=options.processes)
    text = page(outcomes, tallies)
    print(text)
    print("\n".join(faults(outcomes, tallies)))
    if options.write:
        PAGE.write_text(text, encoding="utf-8")
        record.write(record.rows_of(outcomes, processes=options.processes))


if __name__ == "__main__":
    main()
