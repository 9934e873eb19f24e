"""The ids of calls in histories that are rendered again from the start, with every template that shows ids."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from runner import Conversation, Outcome
from runner.engines.scripted.script import ModelCall
from runner.testing import Reply, assert_exact, call
from runner.tokens.template import ChatTemplate, two_templates
from runner.tokens.tool_support import IdUse, id_use
from tests import sweeps
from tests.conformance.corpus import VARIABLES, Entry, corpus
from tests.conformance.sweep import is_tool_capable
from tests.episode.test_chat import result, user
from tests.histories import PLAIN
from tests.playing import Plain, play_all, recording
from tests.verifying import verify

pytestmark = pytest.mark.anyio

READS_IDS = (
    "0xA50C1A1-Mistral-Nemo-Instruct-2407-Heretic-v2",
    "Apriel-1.6-15b-Thinker-fixed",
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Motif-Technologies-Motif-3-Beta",
    "Neelectric-Ministral-8B-Instruct-2410_SFT_mathv00.01",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "ServiceNow-AI-Apriel-1.5-15b-Thinker",
    "ServiceNow-AI-Apriel-1.6-15b-Thinker",
    "ServiceNow-AI-Apriel-Nemotron-15b-Thinker",
    "dphn-Dolphin-Mistral-24B-Venice-Edition",
    "kerzgrr-Monostich-2-base",
    "mistralai-Mistral-7B-Instruct-v0.3",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "moonshotai-Kimi-K2",
    "moonshotai-Kimi-K2-Instruct",
    "moonshotai-Kimi-K2-Instruct-0905",
    "moonshotai-Kimi-K2-Thinking",
    "moonshotai-Kimi-K2.5",
    "moonshotai-Kimi-K2.6",
    "moonshotai-Kimi-K2.7-Code",
    "moonshotai-Kimi-Linear-48B-A3B-Instruct",
    "sophosympatheia-StrawberryLemonade-L3-70B-v1.0",
    "stepfun-ai-RLVR-8B-0926",
    "tiiuae-Falcon-H1-Tiny-Tool-Calling-90M",
    "tiiuae-Falcon3-7B-Instruct",
    "unsloth-Apriel-1.5",
    "upstage-Solar-Open-100B",
)
"""The tool-capable templates of the corpus that show the ids of calls, or refuse some ids."""
PLAYED = tuple(name for name in READS_IDS if name != "kerzgrr-Monostich-2-base")
"""The templates of `READS_IDS` that show definitions of tools. A run refuses the remaining one at its start."""


@pytest.mark.whole
def test_templates_that_read_call_ids_are_the_listed_ones() -> None:
    capable = [entry for entry in corpus() if is_tool_capable(entry)]
    found = [entry.name for entry in capable if id_use(entry.renderer()) is not IdUse.UNREAD]
    assert tuple(found) == READS_IDS


COMMAND = {"type": "string", "description": "The command."}
PARAMETERS = {"type": "object", "properties": {"command": COMMAND}, "required": ["command"]}
RUN = {
    "type": "function",
    "function": {"name": "run", "description": "Run a command.", "parameters": PARAMETERS},
}

FOREIGN = {
    "openai": "call_AbCdEfGhIjKlMnOpQrStUvWx",
    "anthropic": "toolu_01A09q90qw90lq917835lq9",
    "mistral": "D681PevKs",
    "kimi": "functions.look:3",
    "uuid": "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
    "ours": "call_0123456789ab_0",
    "control": "<|im_end|>",
}


def entry_named(name: str) -> Entry:
    return next(each for each in corpus() if each.name == name)


def called(call_id: str, command: str) -> list[dict[str, Any]]:
    function = {"name": "run", "arguments": {"command": command}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call_id, "content": f"result of {command}"},
    ]


async def played(name: str, loop: Any, says: Any, path: Path) -> list[str]:
    """Return the prompts of an episode on a model with this template, after verifying the trajectory."""
    entry = entry_named(name)
    template = ChatTemplate(entry.text, name=entry.name, variables=VARIABLES)
    if name.endswith("-tool_use"):  # the repository also has a template for conversations without tools
        template = two_templates(entry.text, PLAIN, name=entry.name).with_variables(VARIABLES)
    engine = recording(says, template=template)

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await loop(self.episode)

    trajectories = await play_all(Foreign, engine, file=path)
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
        assert_exact(trajectory, engine)
    checked = await anyio.to_thread.run_sync(verify, path)
    assert checked.exit_code == 0, checked.output
    numbers = {(each.agent, request.turn): request.number for each in trajectories for request in each.requests}
    turns = sorted((turn for each in trajectories for turn in each.turns), key=lambda t: numbers[t.agent, t.number])
    return [engine.tokenizer.decode(turn.prompt_ids) for turn in turns]


def assert_shown(name: str, prompt: str, results: int) -> None:
    """Assert that each result and each call has the name of its tool, and an id in the template's format."""
    assert not re.search("AbCdEf|toolu_|look:|3f2504e0|0123456789ab|<.im_end.>b", prompt)
    assert len(set(re.findall("result of ([a-z]+)", prompt))) == results
    if "Kimi" in name:
        shown = re.findall(r"functions\.run:(\d+)", prompt)
        # Kimi's template counts the calls of each turn, not the calls of the conversation.
        assert sorted(set(shown)) == [str(number) for number in range(1 if name == "moonshotai-Kimi-K2" else results)]
    if "istral" in name:
        ids = re.findall(r'"(?:id|call_id)": "([^"]*)"|\[CALL_ID\](\w+)', prompt)
        assert ids
        assert all(re.fullmatch("[0-9A-Za-z]{9}", one or other) for one, other in ids)


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", sweeps.part(PLAYED, 4))
async def test_foreign_ids_have_the_form_that_the_template_wants(name: str, tmp_path: Path) -> None:
    async def loop(episode: Any) -> None:
        for number, call_id in enumerate(FOREIGN.values()):
            history = [user(f"Question {number}."), *called(call_id, "ls"), *called(f"{call_id}b", "pwd")]
            await episode.chat(history, tools=[RUN], train=True)

    prompts = await played(name, loop, ["Done."] * len(FOREIGN), tmp_path / "run.db")
    assert len(prompts) == len(FOREIGN)
    for prompt in prompts:
        assert_shown(name, prompt, 2)


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", sweeps.part(PLAYED, 4))
@pytest.mark.parametrize("foreign", [False, True])
async def test_minted_call_ids_stay_when_the_history_is_rendered_again(
    name: str, foreign: bool, tmp_path: Path
) -> None:
    async def loop(episode: Any) -> None:
        past: list[Any] = called(FOREIGN["openai"], "date") if foreign else []
        for number in range(4):
            # The beginning changes with every request, so that the whole history is rendered again.
            messages = [user(f"Mend it. It is 12:0{number}."), *past]
            turn = await episode.chat(messages, tools=[RUN])
            if turn.tool_calls:
                past += [turn.as_message(), result(turn, f"result of {'abc'[number]}")]

    def says(asked: ModelCall) -> Reply:
        thought = "Hm.</think>" if asked.prompt.rstrip().endswith("<think>") else ""
        if asked.turn == 3:
            return Reply(f"{thought}Done.")
        made = replace(call("run", command="ls"), id=f"functions.run:{asked.turn + foreign}" if "Kimi" in name else "")
        return Reply(thought, calls=[made])

    prompts = await played(name, loop, says, tmp_path / "run.db")
    assert len(prompts) == 4
    for number, prompt in enumerate(prompts):
        if number + foreign:
            assert_shown(name, prompt, number + foreign)
        assert not re.search("call_[0-9a-f]{12}_", prompt)
