"""The page of results, as Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from runner.training import TensorVerdict, Way

__all__ = ["page", "sentence_for"]

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

The reasons are plain sentences; `tests/weight_conformance/results.json` has the errors.

Three notes about single cells:

- On a CPU, `after-sleep` is an update while vLLM is paused, since vLLM releases no memory there. On the GPU, `transfer`
  is CUDA IPC.
- Cases with *prompt* were tested with an older check. It scored ids only in a prompt, and not in steps. It did not
  compare the ids that turns sampled during an update with the weights of their version.
- Cases with *older* were tested with a still older check. In addition, `transfer` sent equal weights twice, `twice`
  began with the starting weights, and `under-turns` did not check that turns ran during the update.
"""


_DIFFERENCE: Final = (
    r": (?P<ids>\d+) ids, median difference (?P<median>[\d.]+) nats \(at most (?P<most_median>[\d.]+)\), "
    r"largest (?P<largest>[\d.]+) \((?:for (?P<share>\d+%) of the ids )?at most (?P<most>[\d.]+)\)"
)

SENTENCES: Final[Mapping[str, str]] = {
    r"module 'triton\.language' has no attribute|adapters on experts only on GPUs": "On a CPU, vLLM does not start "
    "with adapters for models with experts: it needs Triton for them.",
    r"(?P<name>\w+) does not support LoRA yet": "vLLM has no adapters for `{name}`.",
    r"expected target modules in .* but received \['[\w.]+\.(?P<name>\w+)'": "In this architecture, vLLM has no "
    "adapters for layers with the name `{name}`.",
    r"PEFT has no adapter on .* is incompatible with Mamba-based models": "PEFT has no adapters for this layer of a "
    "Mamba block.",
    rf"{_DIFFERENCE}; its scores are those of the old weights": "The engine computes the scores of the old weights, "
    "so the new ones did not arrive: {difference}.",
    rf"^BadModel: vLLM and transformers compute different .*{_DIFFERENCE}": "vLLM and transformers compute different "
    "scores with the starting weights: {difference}.",
    r"does not dispatch through the Transformers attention interface": "vLLM does not implement the model's linear "
    "attention, and cannot use the implementation of transformers.",
    r"CPU GDN attention requires BF16": "On a CPU, vLLM computes the model's linear attention only in bfloat16.",
    r"is_act_and_mul=False is supported only for CUDA": "On a CPU, vLLM does not support experts without a gate.",
    r"'(?P<kind>\w+Config)' object has no attribute '(?P<name>\w+)'": "vLLM reads the setting `{name}`, which the "
    "`{kind}` of transformers does not have.",
    r"'_OpNamespace' '_C' object has no attribute '(?P<name>\w+)'": "vLLM for CPUs lacks the kernel `{name}`.",
    r"No module named '(?P<name>\w+)'": "vLLM needs the package {name}, which was not installed.",
    r"too many values to unpack|Dimension out of range": "vLLM ends with an error in its own code when it starts or "
    "computes the model.",
}
"""Patterns of errors, and the plain sentence for each; groups of the pattern are its placeholders."""


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
            "The wrong row is older than the check in `add_adapter` that refuses such an adapter.",
            "",
            *_reasons(played),
            "",
            "## Not run",
            "",
            "These cases could not be tested: vLLM or transformers cannot run the model on this machine, or the two",
            "compute different log-probabilities with the starting weights.",
            "",
            *(
                f"- {key}, in part: {_plain(result['failure'])}"
                for key, result in results.items()
                if result.get("failure")
            ),
            *_not_run(not_run),
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
                cases = found.setdefault((row["verdict"], _plain(row["reason"])), {})
                cases.setdefault(key, []).append(f"`{row['tensor']} ({row['way']})`")
    for (verdict, reason), cases in sorted(
        found.items(), key=lambda item: list(TensorVerdict).index(TensorVerdict(item[0][0]))
    ):
        yield f"- *{verdict}*{f': {reason}' if reason else ''}"
        yield from (f"    - {key}: {', '.join(tensors)}" for key, tensors in cases.items())


def _not_run(reasons: Mapping[str, str]) -> Iterable[str]:
    """The cases that were not run, by reason."""
    cases: dict[str, list[str]] = {}
    for key, why in reasons.items():
        cases.setdefault(_plain(why), []).append(key)
    for reason, keys in cases.items():
        yield f"- {reason}"
        yield from (f"    - {key}" for key in keys)


def sentence_for(reason: str) -> str | None:
    """Return the plain sentence for an error; None if the error has none."""
    for pattern, sentence in SENTENCES.items():
        if found := re.search(pattern, reason, re.DOTALL):
            return sentence.format(**found.groupdict(), difference=_difference(found.groupdict()))
    return None


def _difference(figures: Mapping[str, str | None]) -> str:
    if figures.get("ids") is None:
        return ""
    share = f" for {figures['share']} of the ids" if figures["share"] else ""
    return (
        f"over {figures['ids']} ids, the median difference is {figures['median']} nats "
        f"(allowed: {figures['most_median']}) and the largest is {figures['largest']} nats "
        f"(allowed{share}: {figures['most']})"
    )


def _plain(reason: str) -> str:
    return sentence_for(reason) or _short(reason)


def _short(reason: str) -> str:
    return reason.replace("\n", " ").replace("|", "/").replace("<", "&lt;")[:300]
