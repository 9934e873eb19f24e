"""`--prices`: the cost of a run, by a table of prices."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from typer.testing import CliRunner

from runner import BadOption, RunFile
from runner.cli.app import app
from runner.engines.message_engine import Usage
from runner.report.prices import costs_of, read_prices
from tests.report.playing import store
from tests.store.building import played

TABLE = """
["m-1"]
prompt = 10
cached = 1
completion = 100

["*"]
prompt = 1e6
completion = 2e6
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    answered = played("a")
    for turn in answered.turns:
        turn.usage = Usage(prompt_tokens=1_000_000, cached_tokens=400_000, completion_tokens=20_000, model="m-1")
    return anyio.run(store, tmp_path / "run.db", [answered, played("b")])


@pytest.fixture
def table(tmp_path: Path) -> Path:
    (tmp_path / "prices.toml").write_text(TABLE)
    return tmp_path / "prices.toml"


def test_cost_counts_prompts_cached_and_sampled_tokens(path: Path, table: Path) -> None:
    with RunFile(path) as run_file:
        by_model = {each.model: each for each in costs_of(run_file, read_prices(table))}
    assert by_model["m-1"].amount == pytest.approx(2 * (0.6 * 10 + 0.4 * 1 + 0.02 * 100))
    own = next(each for name, each in by_model.items() if name != "m-1")
    # Two turns: prompts of 8 and 20 ids, of which 0 and 12 were cached, and 4 sampled ids each.
    assert (own.prompt, own.cached, own.completion) == (28, 12, 8)
    assert own.amount == pytest.approx(28 * 1 + 8 * 2)


def test_model_without_a_price_is_named(path: Path, tmp_path: Path) -> None:
    (tmp_path / "few.toml").write_text('["other"]\nprompt = 1\ncompletion = 1\n')
    output = CliRunner().invoke(app, ["show", str(path), "--prices", str(tmp_path / "few.toml")]).output
    assert output.count("no price") == 2


def test_report_has_the_cost(path: Path, table: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(path), "-o", str(tmp_path / "r.html"), "--prices", str(table)])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "r.html").read_text()
    assert "<h3>Cost</h3>" in text
    assert "16.8" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[m]\nprompt = 1\n", "'m': completion is missing"),
        ("[m]\nprompt = -1\ncompletion = 1\n", "prompt = -1: give a number of at least 0"),
        ("[m]\nprompt = nan\ncompletion = 1\n", "give a number"),
        ("[m]\nprompt = 1\ncompletion = 1\nother = 2\n", "'other' is unknown"),
        ("m = 3\n", "give a section"),
        ("[m\n", "give a TOML file that can be read"),
    ],
)
def test_wrong_table_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "wrong.toml").write_text(text)
    with pytest.raises(BadOption, match=words):
        read_prices(tmp_path / "wrong.toml")
