"""An agent of pydantic-ai: usage: pydantic_agent.py PROMPT."""

import sys

import shell
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("default"), system_prompt="You run commands.")


@agent.tool_plain
def bash(command: str) -> str:
    """Run a command."""
    return shell.run(command)


print(agent.run_sync(sys.argv[1]).output)
