"""The page of results, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from runner.training import TensorVerdict, Way

__all__ = ["page"]

INTRODUCTION: Final = """# Conformance of new weights

This page shows for which model architectures vLLM, as deltarunner uses it, loads new weights correctly. `make
weight-conformance` writes it from the results of `deltarunner check-weights --tiny`.

A *case* is an architecture, with an output layer that is tied to the embedding or not, in a number type. The model has
random weights and two to four layers. The reference is transformers, which computes in float32. A case runs on a CPU,
or, with *GPU* in its name, on one H200 with vLLM 0.32.0 and torch 2.11.

A case has one row for each kind of tensor and each way of giving weights. The columns are
[the ways](weights.md#which-tensors-arrive). `folder` and `state-dict` change each kind of tensor separately, and
`adapter` each kind of linear layer. The other ways change all tensors at once, so they have one row.

A number without a word is the number of *right* rows: the engine computes the log-probabilities of the reference with
the new weights. The other verdicts are:

- *wrong*: it computes other log-probabilities.
- *unseen*: the change moves the log-probabilities by less than rounding does.
- *refused*: the engine refuses such an update, or it does not start with adapters. The reason is below the table.
- `-`: the way was not tested.

Three notes about single cells:

- On a CPU, `after-sleep` is an update while vLLM is paused, since vLLM releases no memory there. On the GPU, `transfer`
  is CUDA IPC.
- Cases with *prompt* were tested with an older check. It scored ids only in a prompt, and not in steps. It did not
  compare the ids that turns sampled during an update with the weights of their version.
- Cases with *older* were tested with a still older check. In addition, `transfer` sent equal weights twice, `twice`
  began with the starting weights, and `under-turns` did not check that turns ran during the update.
"""


def page(results: Mapping[str, Any], cases: Sequence[str]) -> str:
    """Return the generated page, docs/weight-conformance.md.

    Args:
        results: the results so far, by case.
        cases: the names of all cases.
    """
    not_yet = [key for key in cases if key not in results]
    played = {key: result["rows"] for key, result in results.items() if "rows" in result}
    not_run = {key: result["not_run"] for key, result in results.items() if "not_run" in result}
    verdicts = Counter(row["verdict"] for rows in played.values() for row in rows)
    architectures = {key.split(",")[0] for key in played}
    return "\n".join(
        [
            INTRODUCTION,
            f"{len(architectures)} architectures were tested in {len(played)} cases. The verdicts of all rows: "
            + ", ".join(f"{verdicts[verdict]:,} {verdict}" for verdict in TensorVerdict if verdicts[verdict])
            + ".",
            "",
            "| case | " + " | ".join(f"`{way}`" for way in Way) + " |",
            "|---|" + "---|" * len(Way),
            *(
                f"| {key}{_coverage(results[key])} | " + " | ".join(_cell(rows, way) for way in Way) + " |"
                for key, rows in played.items()
            ),
            "",
            "## Wrong, unseen or refused",
            "",
            "On a CPU, vLLM does not start with adapters for models with experts, since it needs Triton for these. The",
            "wrong row is older than the check in `add_adapter` that refuses such an adapter.",
            "",
            *_reasons(played),
            "",
            "## Not run",
            "",
            "These cases could not be tested: vLLM or transformers cannot run the model on this machine, or the two",
            "compute different log-probabilities with the starting weights.",
            "",
            *(
                f"- {key}, in part: {_short(result['failure'])}"
                for key, result in results.items()
                if result.get("failure")
            ),
            *(f"- {key}: {_short(why)}" for key, why in not_run.items()),
            "",
            "## Not tested on a CPU yet",
            "",
            *([f"{len(not_yet)} of the {len(cases)} cases on a CPU: {'; '.join(not_yet)}."] if not_yet else ["None."]),
            "",
        ]
    )


def _coverage(result: Mapping[str, Any]) -> str:
    """Return a mark for a case whose trial covered less than later trials."""
    if result.get("steps") and result.get("turns"):
        return ""
    return " (*prompt*)" if result.get("changes_differ") else " (*older*)"


def _cell(rows: Sequence[Mapping[str, Any]], way: Way) -> str:
    counts = Counter(row["verdict"] for row in rows if row["way"] == way)
    parts = [
        f"{counts[verdict]} {verdict}" if verdict != TensorVerdict.RIGHT else f"{counts[verdict]}" for verdict in counts
    ]
    return ", ".join(parts) or "-"


def _reasons(played: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterable[str]:
    """Return the rows that are not right: each verdict with its reason, followed by the cases with their tensors."""
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for key, rows in played.items():
        for row in rows:
            if row["verdict"] != TensorVerdict.RIGHT:
                cases = found.setdefault((row["verdict"], _short(row["reason"])), {})
                cases.setdefault(key, []).append(f"`{row['tensor']} ({row['way']})`")
    for (verdict, reason), cases in sorted(
        found.items(), key=lambda item: list(TensorVerdict).index(TensorVerdict(item[0][0]))
    ):
        yield f"- *{verdict}*{f': {reason}' if reason else ''}"
        yield from (f"    - {key}: {', '.join(tensors)}" for key, tensors in cases.items())


def _short(reason: str) -> str:
    return reason.replace("\n", " ").replace("|", "/").replace("<", "&lt;")[:300]
