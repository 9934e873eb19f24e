"""The object that an author constructs: its attributes, and the attributes that only an episode's own object has."""

from __future__ import annotations

import pytest

from runner import BadEnvironment, Run, Task
from runner.testing import ScriptedEngine
from tests.playing import Plain

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("name", ["task", "episode", "shared", "tools"])
def test_episode_attribute_outside_an_episode_raises_with_reason(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"^Plain\.{name} exists only in an episode, from setup\(\) on"):
        getattr(Plain(), name)
    assert not hasattr(Plain(), name)
    set_by_hand = Plain()
    setattr(set_by_hand, name, "given")
    assert getattr(set_by_hand, name) == "given"


async def test_tasks_reading_shared_too_early_raise() -> None:
    class Early(Plain):
        def tasks(self) -> list[Task]:
            return [Task(id=str(row)) for row in self.shared]

    with pytest.raises(BadEnvironment, match=r"Early\.shared exists only in an episode.* tasks\(\), lifespan\(\)"):
        async with Run(Early, ScriptedEngine("Yes")):
            pass
