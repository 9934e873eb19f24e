"""Requests of real programs with transport faults: no turn is trained twice, and none is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runner.engines.scripted.script import as_reply
from runner.testing import Latency
from tests.clients.faults import Trouble, troubled
from tests.clients.playing import assert_exact_and_verified, assert_good, by_history, play_program, respelling
from tests.clients.programs import PROGRAMS

pytestmark = pytest.mark.anyio

TRIED = ("mini-swe-agent", "pi", "opencode", "qwen", "codex", "claude")
"""The programs that are tried."""

ENDS = {("qwen", Trouble.CUT), ("qwen", Trouble.LOST_END)}
"""Faults after which a program ends."""


def programs() -> list[Any]:
    return [pytest.param(name, id=name, marks=pytest.mark.client(PROGRAMS[name].client)) for name in TRIED]


@pytest.mark.parametrize("trouble", Trouble, ids=lambda trouble: trouble.name.lower())
@pytest.mark.parametrize("name", programs())
async def test_faults_on_the_way_train_no_turn_twice_and_lose_none(
    name: str, trouble: Trouble, tmp_path: Path, demo_model_folder: Path
) -> None:
    program = PROGRAMS[name]
    program = replace(program, last=program.last[-1:])
    # Slow enough to be cut in the middle.
    engine = respelling(
        by_history(*program.says()), demo_model_folder, tick=0.002, latency=Latency(between=1), chunks=4
    )
    with troubled(trouble, at=program.asides + 1) as proxies:
        played = await play_program(program.argv, engine, tmp_path)
    (proxy,) = proxies
    assert proxy.happened
    said = [as_reply(each).text.rpartition("</think>")[2] for each in program.says()]
    if (name, trouble) in ENDS:
        assert played.finished is not None
        assert played.finished.returncode != 0, played.in_words()
        await assert_exact_and_verified(played, engine, demo_model_folder)
        assert len(played.main.turns) == 2
        return
    await assert_good(played, engine, demo_model_folder)
    kept = [turn.text for turn in played.main.turns if not turn.retried]
    assert kept == said, "each turn is stored once and trained once"
    assert len(played.main.turns) - len(kept) <= 1


@pytest.mark.parametrize("name", programs())
async def test_a_program_waits_for_a_turn_that_begins_late_and_asks_once(
    name: str, tmp_path: Path, demo_model_folder: Path
) -> None:
    program = PROGRAMS[name]
    first, second, *last = program.says()
    late = replace(second, latency=Latency(first=40))
    engine = respelling(by_history(first, late, *last[-1:]), demo_model_folder, tick=0.1)
    played = await play_program(program.argv, engine, tmp_path)
    await assert_good(played, engine, demo_model_folder)
    assert played.verdicts == ["new", "append", "append"]
