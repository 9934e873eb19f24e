"""Real programs whose history exceeds the context: they shorten it, and earlier sampled ids stay exact."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runner.engines.scripted.script import Answer, ModelCall
from runner.testing import Reply
from tests.clients.playing import Says, assert_appends, assert_good, play_program, respelling
from tests.clients.programs import PROGRAMS, Program

pytestmark = pytest.mark.anyio

SUMMARY = "<summary>It counted, and is to write the file.</summary>"


@dataclass(frozen=True, slots=True)
class Outgrown:
    """A program whose history exceeds the context."""

    context: int
    steps: int
    """Number of steps, each of which prints some 5,000 ids."""
    verdicts: tuple[tuple[str, ...], ...]
    """Verdicts of each trained thread, without repeated appends."""
    asides: int
    """Number of untrained threads, including a title if the program requests one."""
    often: bool = False
    """True if it may shorten the history again: the shown part of an output is random."""


OUTGROWN = {
    # The endpoint refuses a history that does not fit. The program then requests a summary in another thread, and keeps
    # its last turns with their ids.
    "pi": Outgrown(32_768, 8, (("new", "edited"),), asides=1),
    # The program uses the limit in its settings.
    "opencode": Outgrown(32_768, 5, (("new",), ("new",)), asides=2),
    # The program requests the summary in the same thread without tools, and drops all of its turns.
    "codex": Outgrown(32_768, 5, (("new", "tools", "rewound"),), asides=0),
    # The program uses the limit in its variables. Its history is refused nevertheless, and it drops its last turn.
    "claude": Outgrown(65_536, 10, (("new", "rewound", "rewound", "edited"),), asides=0),
    "qwen": Outgrown(49_152, 6, (("new", "edited"),), asides=1, often=True),
}


def saying(program: Program, steps: int) -> Says:
    """Reply with this number of steps, however the program changes the history, and with a summary on request."""
    prints = program.shell("yes the quick brown fox jumps over lazy dogs | head -n 600")
    writes = program.shell("echo hello > hello.txt")
    words: list[Answer] = [Reply(f"Step {step}.", calls=[prints]) for step in range(steps)]
    left = iter([*words, Reply("Now I write.", calls=[writes]), "It holds hello."])

    def says(asked: ModelCall) -> Answer:
        wants_summary = "<tools>" not in asked.prompt or "<summary>" in asked.prompt[-1000:]
        return SUMMARY if wants_summary and SUMMARY not in asked.prompt[-1000:] else next(left)

    return says


def programs() -> list[Any]:
    return [pytest.param(name, id=name, marks=pytest.mark.client(PROGRAMS[name].client)) for name in OUTGROWN]


@pytest.mark.parametrize("name", programs())
async def test_program_continues_after_compaction_with_exact_turns(
    name: str, tmp_path: Path, demo_model_folder: Path
) -> None:
    program, outgrown = PROGRAMS[name], OUTGROWN[name]
    engine = respelling(saying(program, outgrown.steps), demo_model_folder, context=outgrown.context)
    played = await play_program(program.argv, engine, tmp_path)
    await assert_good(played, engine, demo_model_folder)
    trained = sorted(played.trajectories, key=lambda each: each.requests[0].number)
    turned = [tuple(each.verdict for each in own.requests if each.verdict != "append") for own in trained]
    more = turned[0].count("edited") - 1 if outgrown.often else 0
    first, *others = outgrown.verdicts
    assert turned == [(*first, *(["edited"] * more)), *others], played.in_words()
    assert [thread.trained for thread in played.threads].count(False) == outgrown.asides + more
    steps = [turn.text for own in trained for turn in own.turns if turn.text != SUMMARY]
    assert steps == [*(f"Step {step}." for step in range(outgrown.steps)), "Now I write.", "It holds hello."]
    for own in trained:
        assert_appends(own)
