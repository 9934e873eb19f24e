"""`python -m tests.weight_conformance`: test weight updates of architectures, and write docs/weight-conformance.md.

Each case runs in its own process, and its result is written into results.json at once, so that a run may be stopped and
continued. Cases with results of an older check are played again, and with `--again` all cases. `--way` plays only this
way, and keeps the results of the other ways. A name limits the run to this architecture. `--gpu` plays the cases for a
GPU instead of the cases for a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from runner.training import Way
from tests.repository import DOCS
from tests.weight_conformance.architectures import ARCHITECTURES, Architecture
from tests.weight_conformance.page import page

RESULTS: Final = Path(__file__).parent / "results.json"
PAGE: Final = DOCS / "weight-conformance.md"
ENVIRONMENT: Final = os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Environment variables of a case. vLLM accepts IPC handles only with this setting."""

CASE_SECONDS: Final = 1200
"""Seconds after which a case is ended."""


ON_A_GPU: Final[dict[str, Any]] = {
    "enforce_eager": True,
    "enable_sleep_mode": True,
    "gpu_memory_utilization": 0.04,
    "kv_cache_memory_bytes": 2**28,
    "weight_transfer_config": {"backend": "ipc"},
}
"""Arguments of the engine on a GPU: little memory, so that several cases can run at the same time."""

SCRATCH: Final = re.compile(r"(/tmp|/dev/shm)/[\w.+@/-]+")
"""Temporary files in error messages, which differ in each run."""


COVERAGE: Final = {"changes_differ": True, "steps": True, "turns": True}
"""New parts of a trial, which earlier trials lack: two different changes in a row, scores of single steps, and turns
across the update.
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One trial: an architecture with a kind of output layer, in a number type."""

    architecture: Architecture
    tied: bool
    dtype: str
    gpu: bool = False

    @property
    def key(self) -> str:
        """Return the name of the case in the results."""
        output = "tied" if self.tied else "untied"
        return f"{self.architecture.name}, {output}, {self.dtype}{', GPU' if self.gpu else ''}"


def cases() -> Iterator[Case]:
    """Yield all cases: each architecture in float32, with its other output layer, then in bfloat16, then on a GPU."""
    for dtype, gpu in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
        for number in range(2):
            for architecture in ARCHITECTURES:
                if number < len(architecture.tied):
                    yield Case(architecture, architecture.tied[number], dtype, gpu)


def play_here(case: Case, ways: Sequence[str]) -> dict[str, Any]:
    """Try one case in this process."""
    import tempfile

    from runner.errors import DeltarunnerError, one_line
    from runner.training import check_weights

    of = case.architecture
    config = of.configuration(vocab_size=1000, tie_word_embeddings=case.tied)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            report = check_weights(folder, tiny=True, ways=ways, dtype=case.dtype, **(ON_A_GPU if case.gpu else {}))
        except DeltarunnerError as error:
            return {"not_run": one_line(error)}
    if report.failure and not report.rows:
        return {"not_run": report.failure}
    return {"rows": [asdict(row) for row in report.rows], "failure": report.failure, **COVERAGE}


def play(case: Case, ways: Sequence[str] = tuple(Way)) -> dict[str, Any]:
    """Try one case in a new process. Any end of the process is a result."""
    command = [sys.executable, "-m", "tests.weight_conformance", "--one", case.key]
    command += [argument for way in ways for argument in ("--way", way)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=CASE_SECONDS, check=False, env=ENVIRONMENT
        )
    except subprocess.TimeoutExpired:
        return {"not_run": f"not done after {CASE_SECONDS} s"}
    if done.returncode:
        return {"not_run": last_error(done.stderr)}
    result: dict[str, Any] = json.loads(SCRATCH.sub("FOLDER", done.stdout.splitlines()[-1]))
    return result


def last_error(stderr: str) -> str:
    """Return the last line of a process's output that names an error, or else the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no message"]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Dead)\b", line)), lines[-1])


def play_again(case: Case, old: Mapping[str, Any], ways: Sequence[str]) -> dict[str, Any]:
    """Replace the rows of some ways in a result."""
    new = play(case, ways)
    if "rows" not in new or "rows" not in old:
        return new
    rows = [*new["rows"], *(row for row in old["rows"] if row["way"] not in ways)]
    order = [str(way) for way in Way]
    others = {row["way"] for row in old["rows"]} - set(ways)
    all_again = {
        "changes_differ": set(ways) >= {Way.TWICE, Way.TRANSFER},
        "steps": not others,
        "turns": Way.UNDER_TURNS in ways,
    }
    rows.sort(key=lambda row: order.index(row["way"]))
    return {**new, "rows": rows, **{name: again or old.get(name, False) for name, again in all_again.items()}}


def read_results() -> dict[str, Any]:
    """Return the results so far, by case."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}


def write_results(results: Mapping[str, Any]) -> None:
    """Write the results in the order of the cases, one per line."""
    lines = [f"{json.dumps(case.key)}: {json.dumps(results[case.key])}" for case in cases() if case.key in results]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _is_named(case: Case, names: Sequence[str]) -> bool:
    return not names or case.key in names or case.architecture.name in names


def is_current(result: Mapping[str, Any] | None) -> bool:
    """Return whether a result is up to date: older checks compared less."""
    return result is not None and ("rows" not in result or all(result.get(name, False) for name in COVERAGE))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.weight_conformance", description=__doc__)
    parser.add_argument("architectures", nargs="*", help="architectures or cases; all by default")
    parser.add_argument("--again", action="store_true", help="also play cases that have a current result")
    parser.add_argument("--way", action="append", choices=list(Way), help="only this way; may be repeated")
    parser.add_argument("--gpu", action="store_true", help="the cases of a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="number of cases at once")
    parser.add_argument("--page-only", action="store_true", help="only write the page")
    parser.add_argument("--one", metavar="CASE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        (case,) = (case for case in cases() if case.key == options.one)
        print(json.dumps(play_here(case, options.way or tuple(Way))))
        return
    results = read_results()

    def play_one(case: Case) -> None:
        print(case.key, flush=True)
        old = results.get(case.key)
        ways = options.way or tuple(Way)
        result = play_again(case, old, ways) if old and options.way else play(case, ways)
        with lock:
            results[case.key] = result
            write_results(results)

    lock = threading.Lock()
    chosen = [case for case in cases() if case.gpu == options.gpu and _is_named(case, options.architectures)]
    todo = [case for case in chosen if options.again or not is_current(results.get(case.key))]
    with ThreadPoolExecutor(options.jobs) as jobs:
        list(jobs.map(play_one, () if options.page_only else todo))
    PAGE.write_text(page(results, [case.key for case in cases() if not case.gpu]), encoding="utf-8")


if __name__ == "__main__":
    main()
