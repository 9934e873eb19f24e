"""Call formats of the corpus's templates, each learnt once per session, and one template for every format class."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

from runner.parsing.cut_points import CutPoints
from runner.parsing.learning.calls import learn_calls
from runner.parsing.learning.probe_renders import FormatProber, UnlearnableFormat
from runner.parsing.turn_format import CallFormat
from tests.conformance.corpus import corpus, every_control_token, is_special

__all__ = ["CLASSES", "learnt"]

CLASSES: Final[Mapping[str, str]] = {
    "JSON object": "Qwen-Qwen3-0.6B",
    "JSON object, escaped": "Reka-Edge",
    "JSON object without a trigger": "ApolloRaines-Llama-3.3-8B-Instruct-128K-Jbliterated",
    "JSON list with ids": "mistralai-Mistral-7B-Instruct-v0.3",
    "JSON list with indices": "Cohere2MoE",
    "JSON list, indented": "tiiuae-Falcon3-7B-Instruct",
    "JSON with the name as key": "danish-foundation-models-croco-munin-apertus-8b-da-simpo-full-50k",
    "name and JSON": "ArmGPT-ArmenianGPT-1.0-3B",
    "name and compact JSON": "kakaocorp-kanana-1.5-15.7b-a3b-instruct",
    "name in the id": "moonshotai-Kimi-K2-Instruct",
    "name and Python": "ServiceNow-AI-Apriel-Nemotron-15b-Thinker",
    "raw strings": "Goekdeniz-Guelmez-JOSIE-2-4B-Preview",
    "raw strings and Python": "ByteDance-Seed-OSS",
    "raw strings without a close": "GLM-4.6",
    "raw strings in CDATA": "ai9stars-G9v3-3B",
    "raw strings, typed": "deepseek-ai-DeepSeek-V3.2",
    "own notation": "Gryphe-Gemma-4-31B-StyleTune",
    "Python calls": "allenai-Olmo-3-7B-Instruct",
    "Python calls, quoted and unescaped": "LFM2.5-8B-A1B",
}


@functools.cache
def learnt(name: str) -> CallFormat | None:
    """Return the format of a template's calls, or None if the template shows no calls that can be learnt."""
    entry = next(entry for entry in corpus() if entry.name == name)
    try:
        return learn_calls(FormatProber(entry.renderer(), _marks(), _special()))
    except UnlearnableFormat:
        return None


@functools.cache
def _marks() -> CutPoints:
    return CutPoints(frozenset(every_control_token()))


@functools.cache
def _special() -> frozenset[str]:
    return frozenset(token for token in every_control_token() if is_special(token))
