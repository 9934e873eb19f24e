"""Recordings of the requests of installed agent programs: each plays, and its requests are reduced and stored."""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio

from runner.chat_requests import ChatCall, ChatRequest
from runner.endpoint.anthropic_messages import AnthropicMessages
from runner.endpoint.chat_completions import ChatCompletions
from runner.endpoint.responses import Responses
from runner.endpoint.wire_form import WireForm, WireRequest
from runner.episode.alignment import RequestAlignment
from runner.episode.chat_service import ChatService
from runner.episode.state import ConversationState
from runner.models import demo_model
from runner.testing import Latency, Reply
from tests.clients.faults import Trouble, troubled
from tests.clients.installing import CLIENTS
from tests.clients.playing import PROMPT, ProgramEpisode, Says, by_history, in_order, play_program, respelling
from tests.clients.programs import KNOWN, PROGRAMS, SCRIPTS, Program
from tests.clients.reduce import SentRequest, as_text, reduced
from tests.clients.test_compaction import OUTGROWN
from tests.clients.test_compaction import saying as compacting
from tests.clients.test_smolagents_code import CODE
from tests.clients.test_sub_agents import SENDS
from tests.clients.test_sub_agents import saying as sending
from tests.episode.recorded import FOLDER

__all__ = ["SCENARIOS", "Scenario", "captured", "main"]


@dataclass(slots=True)
class Captured:
    """A request as it was received, and its place among the answered requests."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]
    form: str
    thread: ConversationState | None = None
    record: ChatRequest | None = None
    parent: ChatRequest | None = None

    def sent(self, tokenizer: Any, places: Mapping[int, int]) -> SentRequest:
        """The request with its answer and its verdict."""
        assert self.thread is not None
        assert self.record is not None
        node = next(each for each in self.thread.nodes if each.turn.number == self.record.turn)
        turn = node.turn
        return SentRequest(
            form=self.form,
            headers=self.headers,
            body=self.body,
            says=tokenizer.decode(turn.token_ids).removesuffix("<|im_end|>"),
            handle=turn.handle,
            ends=self.record.delivery.value,
            trained=self.thread.train,
            verdict=self.record.verdict.value,
            again=self.record.again.value,
            tolerated=[each.value for each in self.record.tolerated],
            parent=None if self.parent is None else places[self.parent.number],
            cause=node.segment.cause,
        )


@contextmanager
def captured() -> Iterator[list[Captured]]:
    """The requests that endpoints receive inside the block."""
    came: list[Captured] = []
    read_by: dict[type[WireForm], Any] = {form: form.read for form in (ChatCompletions, Responses, AnthropicMessages)}
    record = ChatService._record

    def reading(form: type[WireForm]) -> Callable[..., WireRequest]:
        def read(self: WireForm, body: Mapping[str, Any], headers: Mapping[str, str]) -> WireRequest:
            request: WireRequest = read_by[form](self, body, headers)
            came.append(Captured(body, headers, self.name))
            known[id(request.chat_call.messages)] = came[-1]
            kept.append(request)
            return request

        return read

    def recording(
        self: ChatService, thread: ConversationState, chat_call: ChatCall, found: RequestAlignment, seconds: float
    ) -> Any:
        made = record(self, thread, chat_call, found, seconds)
        one = known[id(chat_call.messages)]
        one.thread, one.record = thread, made
        one.parent = None if found.parent is None else found.parent.record
        return made

    known: dict[int, Captured] = {}
    kept: list[WireRequest] = []  # kept, so that no later list has the same address
    with ExitStack() as stack:
        for form in read_by:
            stack.enter_context(patch.object(form, "read", reading(form)))
        stack.enter_context(patch.object(ChatService, "_record", recording))
        yield came


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The task of a program."""

    program: Program
    says: Says
    argv: Callable[..., Any] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    serve: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    trouble: Trouble | None = None

    async def play(self, folder: Path) -> tuple[ProgramEpisode, list[SentRequest]]:
        """Let the program play, without reducing anything."""
        engine = respelling(self.says, demo_model(), **self.engine)
        with captured() as came, ExitStack() as stack:
            if self.trouble is not None:
                stack.enter_context(troubled(self.trouble, at=self.program.asides + 1))
            played = await play_program(self.argv or self.program.argv, engine, folder, env=self.env, serve=self.serve)
        # A request has no record of a turn if it was refused, or cut before anything was sampled.
        answered = [each for each in came if each.record is not None and each.record.turn is not None]
        answered.sort(key=lambda each: each.record.number if each.record is not None else 0)
        places = {each.record.number: place for place, each in enumerate(answered) if each.record is not None}
        return played, [each.sent(engine.tokenizer, places) for each in answered]


def silent(program: Program) -> Says:
    """Return calls without text beside them."""
    said = [replace(each, text="") if isinstance(each, Reply) else each for each in program.says()]
    return in_order(*said)


def cut(name: str, begun: str = "", tick: float = 0.002) -> Scenario:
    """Return a scenario whose second answer is cut in the middle of a text."""
    program = PROGRAMS[name]
    says = [*program.says()[:2], program.last[-1]]
    says[1] = replace(says[1], text=f"{begun}Now I write, and I say at length what it is that I write, and why.")
    slow = {"tick": tick, "latency": Latency(between=1), "chunks": 4}
    return Scenario(program=program, says=by_history(*says), engine=slow, trouble=Trouble.CUT)


def scenarios() -> dict[str, Scenario]:
    """The recordings by name: the client, and its task."""
    made = {
        f"{name.replace(' ', '-')}.tools": Scenario(program=each, says=in_order(*each.says()))
        for name, each in PROGRAMS.items()
    }
    for name in ("pi", "pydantic-ai", "autogen", "qwen", "opencode"):
        made[f"{name}.silent"] = Scenario(program=PROGRAMS[name], says=silent(PROGRAMS[name]))
    together = {"tick": 0.002, "latency": Latency(first=20)}
    for name, send in SENDS.items():
        made[f"{name}.sub-agents"] = Scenario(
            program=PROGRAMS[name], says=sending(PROGRAMS[name], send), engine=together
        )
    for name, outgrown in OUTGROWN.items():
        made[f"{name}.compaction"] = Scenario(
            program=PROGRAMS[name],
            says=compacting(PROGRAMS[name], outgrown.steps),
            engine={"context": outgrown.context},
        )
    claude, mini, smolagents = PROGRAMS["claude"], PROGRAMS["mini-swe-agent"], PROGRAMS["smolagents"]
    python = [CLIENTS["smolagents"].program("python"), str(SCRIPTS / "smolagents_code.py"), PROMPT]
    made |= {
        "claude.billed": Scenario(
            program=claude, says=in_order(*claude.says()), env={"CLAUDE_CODE_ATTRIBUTION_HEADER": "1"}
        ),
        "claude.cut": cut("claude"),
        # So fast that its reasoning is complete at the cut.
        "codex.cut": cut("codex", "<think>Hm.</think>", tick=0.0008),
        "mini-swe-agent.forgets": Scenario(program=mini, says=in_order("It holds nothing.", *mini.says())),
        "smolagents.code": Scenario(
            program=smolagents,
            says=lambda asked: CODE[min(asked.turn, len(CODE) - 1)],
            argv=lambda _: python,
            serve={"train": True},
        ),
    }
    return made


SCENARIOS = scenarios()


async def record(name: str) -> bool:
    """Write a recording, and return whether this succeeded."""
    scenario = SCENARIOS[name]
    client = scenario.program.client
    if CLIENTS[client].missing:
        print(f"recording: {name} is left out: {CLIENTS[client].missing}", flush=True)
        return True
    with tempfile.TemporaryDirectory() as folder:
        played, sent = await scenario.play(Path(folder))
    if played.finished is None or not played.finished.ok:
        print(f"recording: {name} failed: {played.in_words()}", flush=True)
        return False
    path = FOLDER / f"{name}.json"
    path.write_text(as_text(reduced(client, KNOWN[client].tested, name.partition(".")[2], sent)))
    verdicts = " ".join(f"{each.verdict}{'/' if each.again else ''}{each.again}" for each in sent)
    print(f"recording: {name}: {verdicts}, {path.stat().st_size / 1000:.0f} kB", flush=True)
    return True


def main(names: list[str]) -> int:
    """Record all scenarios, or the named ones."""
    FOLDER.mkdir(exist_ok=True)
    done = [anyio.run(functools.partial(record, name)) for name in names or SCENARIOS]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
