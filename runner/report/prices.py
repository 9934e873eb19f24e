"""The cost of a run by a table of prices."""

from __future__ import annotations

import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from runner.checked import is_number
from runner.errors import BadOption
from runner.report.header_view import model_name
from runner.store.columns import decode_text
from runner.store.reader import RunFile

__all__ = ["Cost", "Price", "costs_of", "read_prices"]

PRICED_TOKEN_COUNT: Final = 1_000_000
OTHER_MODELS: Final = "*"
"""The entry of a table for models that have no entry."""


@dataclass(frozen=True, slots=True)
class Price:
    """The prices of a million tokens of a model, in any currency."""

    prompt: float
    completion: float
    cached: float
    """The price of prompt tokens in the server's cache."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The tokens of a model in a run, with their cost."""

    model: str
    prompt: int
    """Prompt tokens, with the cached ones."""
    cached: int
    completion: int
    amount: float | None
    """The cost in the currency of the table; None without a price."""


def read_prices(path: Path) -> dict[str, Price]:
    """Read a table of prices: a TOML file with a section for each model, and `"*"` for all others.

    Raises:
        BadOption: the file cannot be read, or a price is missing, unknown or not a number of at least 0.
    """
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadOption(f"--prices {path}: give a TOML file that can be read ({error}).") from error
    return {model: _price(path, model, fields) for model, fields in table.items()}


def _price(path: Path, model: str, fields: Any) -> Price:
    where = f"--prices {path}: {model!r}"
    if not isinstance(fields, Mapping):
        raise BadOption(f"{where}: give a section with the prices of a million tokens: prompt, completion, cached.")
    for name, value in fields.items():
        if name not in ("prompt", "completion", "cached"):
            raise BadOption(f"{where}: {name!r:.60} is unknown: give only prompt, completion and cached.")
        if not is_number(value) or not 0 <= value < float("inf"):
            raise BadOption(f"{where}: {name} = {value!r:.60}: give a number of at least 0.")
    for name in ("prompt", "completion"):
        if name not in fields:
            raise BadOption(f"{where}: {name} is missing: give the price of a million tokens, {name} = NUMBER.")
    # Servers without a price for cached tokens charge them like other prompt tokens.
    return Price(fields["prompt"], fields["completion"], fields.get("cached", fields["prompt"]))


_TOKENS: Final = """
    SELECT usage_model, episodes.agent,
        total(coalesce(usage_prompt, start)) AS prompt, total(coalesce(usage_cached, turns.cached)) AS cached,
        total(coalesce(usage_completion, "end" - start)) + total(resampled) AS completion
    FROM turns JOIN episodes ON episodes.key = turns.episode GROUP BY usage_model, episodes.agent
"""


def costs_of(run_file: RunFile, prices: Mapping[str, Price]) -> list[Cost]:
    """The cost of each model, including attempts that were repeated.

    The token counts are the server's. If the server reports none, they are numbers of ids.
    """
    tokens: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in run_file.select(_TOKENS):
        name = _model(run_file, row["usage_model"], row["agent"])
        for place, column in enumerate(("prompt", "cached", "completion")):
            tokens[name][place] += int(row[column])
    return list(_costs(tokens, prices))


def _model(run_file: RunFile, answered_by: Any, agent: Any) -> str:
    if answered_by is not None:
        return decode_text(answered_by)
    own = run_file.header.engines.get(decode_text(agent), {}).get("model")
    return own if isinstance(own, str) else model_name(run_file.header)


def _costs(tokens: Mapping[str, list[int]], prices: Mapping[str, Price]) -> Iterator[Cost]:
    for model, (prompt, cached, completion) in tokens.items():
        price = prices.get(model, prices.get(OTHER_MODELS))
        amount = None
        if price is not None:
            parts = (prompt - cached) * price.prompt + cached * price.cached + completion * price.completion
            amount = parts / PRICED_TOKEN_COUNT
        yield Cost(model, prompt, cached, completion, amount)
