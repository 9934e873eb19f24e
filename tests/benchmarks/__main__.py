"""All benchmarks, or the named ones, one after the other, each in a new process: `python -m tests.benchmarks`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from tests.benchmarks.figures import Figure, show

NAMES = (
    "start",
    "parts",
    "fixup",
    "deltas",
    "masks",
    "kit",
    "interop",
    "scripted",
    "turns",
    "turn_cost",
    "together",
    "live",
    "streams",
    "endpoint",
    "parity",
    "fleet",
    "losses",
    "engine_process",
    "fleet_weights",
    "ranks",
    "proofs",
    "verifiers",
    "trainers",
    "sandboxes",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures of the runner beside what they should be.")
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME", help=f"which: {', '.join(NAMES)}")
    parser.add_argument("--json", action="store_true", help="one object a line instead of a table")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    figures: list[Figure] = []
    for name in arguments.names:
        print(f"bench: {name}", file=sys.stderr, flush=True)
        figures += _measured(name)
    if arguments.json:
        for figure in figures:
            print(json.dumps(figure.as_dict()))
    else:
        show(figures)


def _measured(name: str) -> list[Figure]:
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--json"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [
        Figure(row["name"], row["unit"], tuple(row["values"]), at_least=row["at_least"], under=row["under"])
        for row in rows
    ]


if __name__ == "__main__":
    main()
