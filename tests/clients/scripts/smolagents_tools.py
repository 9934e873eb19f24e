"""A tool-calling agent of smolagents: usage: smolagents_tools.py PROMPT."""

import os
import sys

import shell
from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: the command
    """
    return shell.run(command)


model = OpenAIServerModel("default", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(ToolCallingAgent(tools=[bash], model=model, max_steps=6).run(sys.argv[1]))
