"""The page of results, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from runner.training import TensorVerdict, Way

__all__ = ["page"]

INTRODUCTION: Final = """# Conformance of new weights

Written by `make weight-conformance`; the results are those of `deltarunner check-weights --tiny` on a CPU, with random
weights, two to four layers, and transformers in float32 as the reference. Each kind of tensor is changed by itself by
`folder` and `state-dict`, and each kind of linear layer by `adapter`; the other ways change all tensors at once.
[New weights](weights.md#which-tensors-arrive) explains the ways. The cases with *GPU* were played on one H200 by
`--gpu`, with vLLM 0.32.0 and torch 2.11; their `transfer` is CUDA IPC.

A cell has the number of rows that are right, and - where the way was not played. Any other verdict is named: *unseen*
(the change moves scores by less than rounding does), *refused* (the reason is below), *wrong*.
`after-sleep` on a CPU is an update while vLLM is paused, since it releases no memory there. In the cases with *older*,
`transfer` sent equal weights twice, `twice` began with the first weights again, and `under-turns` did not check that
turns ran across the update. In these and in those with *prompt*, ids were scored as a prompt alone, and not in steps.
In none of both were the ids of turns across the update compared with the weights that sampled them.
"""


def page(results: Mapping[str, Any], cases: Sequence[str]) -> str:
    """The generated page, docs/weight-conformance.md.

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
            f"{len(architectures)} architectures in {len(played)} cases: "
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
            *_reasons(played),
            "",
            "## Not run",
            "",
            "vLLM or transformers does not run these here, or both compute different things with the same weights.",
            "",
            *(
                f"- {key}, in part: {_short(result['failure'])}"
                for key, result in results.items()
                if result.get("failure")
            ),
            *(f"- {key}: {_short(why)}" for key, why in not_run.items()),
            "",
            "## Not played on a CPU yet",
            "",
            *([f"{len(not_yet)} of {len(cases)} cases: {'; '.join(not_yet)}."] if not_yet else ["None."]),
            "",
        ]
    )


def _coverage(result: Mapping[str, Any]) -> str:
    """A mark for a case whose trial covered less than later ones."""
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
    found: dict[tuple[str, str, str], list[str]] = {}
    for key, rows in played.items():
        for row in rows:
            if row["verdict"] != TensorVerdict.RIGHT:
                found.setdefault((key, row["verdict"], _short(row["reason"])), []).append(
                    f"{row['tensor']} ({row['way']})"
                )
    for (key, verdict, reason), tensors in found.items():
        yield f"- {key}, {verdict}: {', '.join(f'`{tensor}`' for tensor in tensors)}{f': {reason}' if reason else ''}"


def _short(reason: str) -> str:
    return reason.replace("\n", " ").replace("|", "/").replace("<", "&lt;")[:300]
