"""An agent of openai-agents: usage: openai_agents.py chat|responses PROMPT."""

import asyncio
import sys

import shell
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)
set_default_openai_api("chat_completions" if sys.argv[1] == "chat" else "responses")


@function_tool
def bash(command: str) -> str:
    """Run a command."""
    return shell.run(command)


async def main() -> None:
    agent = Agent(name="worker", instructions="You run commands.", tools=[bash], model="default")
    running = Runner.run_streamed(agent, sys.argv[2])
    async for _ in running.stream_events():
        pass
    print(running.final_output)


asyncio.run(main())
