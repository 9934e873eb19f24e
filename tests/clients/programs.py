"""The agent programs that are tested: their command lines, and the known properties of their requests."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import ToolCall
from runner.endpoint import client_config
from runner.endpoint.endpoint import Endpoint
from runner.testing import Reply, call
from tests.clients.installing import CLIENTS
from tests.clients.playing import PROMPT

__all__ = ["PROGRAMS", "SCRIPTS", "Program"]

KNOWN = {client.name: client for client in client_config.CLIENTS}

SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """An agent program."""

    client: str
    """The name of the installed client."""
    script: Sequence[str] = ()
    """For a library: the script and its arguments before the prompt."""
    shell: Callable[[str], ToolCall]
    """Function from a command to a call of the program's shell tool."""
    form: str = "chat"
    """The wire format of its requests."""
    last: Sequence[Any] = ("It holds hello.",)
    """The last replies."""
    verdicts: Sequence[str] = ("new", "append", "append")
    """The expected verdicts on its requests."""
    tolerated: frozenset[str] = frozenset()
    """The program's tolerated changes to messages that it sends back."""
    asides: int = 0
    """The number of its untrained threads."""

    def argv(self, endpoint: Endpoint) -> list[str]:
        command = shlex.split(KNOWN[self.client].command) or ["python", *self.script, "{prompt}"]
        program, *arguments = [PROMPT if each == "{prompt}" else each for each in command]
        return [CLIENTS[self.client].program(program), *arguments]

    def says(self) -> list[Any]:
        """Reply with two calls at once, another call, and an end."""
        return [
            Reply("<think>Where am I? </think>Let me look.", calls=[self.shell("pwd"), self.shell("ls")]),
            Reply("Now I write.", calls=[self.shell("echo hello > hello.txt")]),
            *self.last,
        ]


def bash(command: str) -> ToolCall:
    return call("bash", command=command)


def script(client: str, name: str, *arguments: str, **known: Any) -> Program:
    """Return a program that is an agent of a library, in a script."""
    return Program(client=client, script=[str(SCRIPTS / name), *arguments], **{"shell": bash, **known})


def tolerated(*names: str) -> frozenset[str]:
    return frozenset(names)


PROGRAMS = {
    "mini-swe-agent": Program(
        client="mini-swe-agent",
        shell=bash,
        # The program drops a turn without a call, and requests it again.
        last=["It holds hello.", call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")],
        verdicts=["new", "append", "append", "rewound"],
        tolerated=tolerated("extra_keys"),
    ),
    "openai-agents chat": script(
        "openai-agents", "openai_agents.py", "chat", tolerated=tolerated("reasoning_left_out")
    ),
    "openai-agents responses": script("openai-agents", "openai_agents.py", "responses", form="responses"),
    "pydantic-ai": script("pydantic-ai", "pydantic_agent.py"),
    "smolagents": script(
        "smolagents",
        "smolagents_tools.py",
        last=[call("final_answer", answer="It holds hello.")],
        # The program writes calls and results as text.
        verdicts=["new", "retold", "retold"],
        tolerated=tolerated("content_parts"),
    ),
    "langgraph": script(
        "langgraph", "langgraph_agent.py", tolerated=tolerated("reasoning_left_out", "arguments_respelt")
    ),
    "autogen": script("autogen", "autogen_agent.py", tolerated=tolerated("reasoning_left_out")),
    "inspect-ai": script(
        "inspect-ai",
        "inspect_agent.py",
        last=[call("submit", answer="It holds hello.")],
        tolerated=tolerated("white_space", "arguments_respelt"),
    ),
    "pi": Program(
        client="pi",
        shell=bash,
        tolerated=tolerated("content_parts"),
    ),
    "codex": Program(
        client="codex",
        shell=lambda command: call("exec_command", cmd=command),
        form="responses",
    ),
    "claude": Program(
        client="claude",
        shell=lambda command: call("Bash", command=command),
        form="anthropic",
        tolerated=tolerated("cache_marks"),
    ),
    "opencode": Program(
        client="opencode",
        shell=lambda command: call("bash", command=command, description="Run it"),
        asides=1,  # a title, before all other requests
    ),
    "qwen": Program(
        client="qwen",
        shell=lambda command: call("run_shell_command", command=command, is_background=False),
        tolerated=tolerated("content_parts"),
    ),
}
"""The programs, by name."""
