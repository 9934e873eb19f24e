"""The scenarios with real vocabularies and texts of all kinds, for vocabularies whose templates are in the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from tests.conformance.corpus import corpus
from tests.conformance.scenarios import Case, Past, Scenario, case
from tests.conformance.sweep import Verdict, is_tool_capable, judge, spread
from tests.tokens.vocabularies import spoken, vocabulary

__all__ = ["PAIRS", "Pair", "Tally", "play_all", "play_pair"]

_WIDE = "\uff5c"
_VARIABLES = {
    "qwen": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    "qwen3_6": {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"},
    "deepseek": {
        "bos_token": f"<{_WIDE}begin\u2581of\u2581sentence{_WIDE}>",
        "eos_token": f"<{_WIDE}end\u2581of\u2581sentence{_WIDE}>",
    },
    "tekken": {"bos_token": "<s>", "eos_token": "</s>"},
    "mistral_sentencepiece": {"bos_token": "<s>", "eos_token": "</s>"},
    "smollm2": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
}
_TEMPLATES = {
    "qwen": (
        "Qwen-QwQ-32B", "Qwen-QwQ-32B-Preview", "Qwen-Qwen2-1.5B-Instruct", "Qwen-Qwen2.5-7B-Instruct",
        "Qwen-Qwen2.5-Math-1.5B-Instruct", "Qwen-Qwen2.5-VL-7B-Instruct", "Qwen-Qwen3-0.6B",
        "Qwen-Qwen3-4B-Instruct-2507", "Qwen-Qwen3-4B-Thinking-2507", "Qwen-Qwen3-Coder-30B-A3B-Instruct",
        "Qwen-Qwen3-VL-8B-Instruct", "Qwen-Qwen3-VL-8B-Thinking",
    ),
    "qwen3_6": ("Qwen-Qwen3.5-0.8B", "Qwen-Qwen3.6-35B-A3B", "Qwen3.5-4B"),
    "deepseek": (
        "deepseek-ai-DeepSeek-V3.1", "tencent-DeepSeek-V3.1-Terminus-W4AFP8", "llama-cpp-deepseek-r1",
        "trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528", "yujiepan-deepseek-v3-tiny-random",
    ),
    "tekken": (
        "mistralai-Mistral-Nemo-Instruct-2407", "mistralai-Mistral-Small-24B-Instruct-2501",
        "mistralai-Mistral-Small-3.1-24B-Instruct-2503", "unsloth-mistral-Devstral-Small-2507",
        "mistralai-Ministral-3-8B-Instruct-2512",
    ),
    "mistral_sentencepiece": (
        "mistralai-Mistral-7B-Instruct-v0.2", "mistralai-Mistral-7B-Instruct-v0.3", "mistralai-Codestral-22B-v0.1",
    ),
    "smollm2": ("HuggingFaceTB-SmolLM2-135M-Instruct", "HuggingFaceTB-SmolLM3-3B"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """A vocabulary, and a template of a model with this vocabulary."""

    vocabulary: str
    template: str


PAIRS = tuple(Pair(name, template) for name, templates in _TEMPLATES.items() for template in templates)


@dataclass(frozen=True, slots=True)
class Tally:
    """Results of the cases of a pair."""

    pair: Pair
    """The vocabulary and the template."""
    anchors: Mapping[str, int]
    """Number of exact bridges, by their anchor."""
    refused: Mapping[str, int]
    """Number of refusals, by name."""
    wrong: Sequence[str]
    """A line for each wrong bridge."""


def play_all(*, processes: int = 2) -> list[Tally]:
    """Play every pair."""
    return spread(play_pair, PAIRS, processes)


def play_pair(pair: Pair, wanted: int = 200) -> Tally:
    """Play the first `wanted` applicable cases of a pair, over all seeds, with one bridger."""
    entry = next(entry for entry in corpus() if entry.name == pair.template)
    variables = _VARIABLES[pair.vocabulary]
    cases = list(islice(_cases(is_tool_capable(entry)), wanted * 3))
    judgements = judge(cases, entry.renderer(variables), vocabulary(pair.vocabulary), variables["eos_token"])
    played = [
        (made, verdict, detail)
        for made, (verdict, detail, _) in zip(cases, judgements, strict=True)
        if verdict not in (Verdict.NOT_APPLICABLE, Verdict.NO_EXACT_BRIDGE)
    ][:wanted]
    return Tally(
        pair,
        Counter(detail for _, verdict, detail in played if verdict is Verdict.EXACT),
        Counter(detail for _, verdict, detail in played if verdict is Verdict.REFUSED),
        [f"{made.scenario}, {made.past}: {detail}" for made, verdict, detail in played if verdict is Verdict.WRONG],
    )


def _cases(capable: bool) -> Iterator[Case]:
    for seed in count():
        for past in Past:
            for scenario in Scenario:
                if capable or not (scenario.needs_tools or past.has_tools()):
                    yield case(scenario, past, seed, tools=capable, filler=spoken)
