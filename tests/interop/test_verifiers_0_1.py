"""Environments of verifiers 0.1 with the class of the page and the real package."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner import Outcome, ScriptedEngine
from runner.testing import call, play_many_async
from tests.repository import DOCS

pytestmark = [pytest.mark.anyio, pytest.mark.package("verifiers.rubrics")]


@pytest.mark.filterwarnings("ignore")
async def test_class_of_the_page_plays_an_old_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    page = (DOCS / "tasksets.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "OldVerifiers" in each]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "tasksets.md", "exec"), names)
    environment = names["OldVerifiers"]("verifiers-sums")
    played = await play_many_async(environment, ScriptedEngine([[call("add", a=2, b=3)], "5"]), breaker=1)
    first, second = sorted(played, key=lambda each: each.task.id)
    assert (first.outcome, first.reward, second.reward) == (Outcome.COMPLETED, 1.0, 0.0), first.error
    assert [m["role"] for m in first.messages] == ["user", "assistant", "tool", "assistant"]
    asked, answered = first.turns
    assert list(answered.prompt_ids)[: asked.end] == [*asked.prompt_ids, *asked.token_ids]
    assert first.trained
