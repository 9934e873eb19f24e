"""An agent of smolagents that calls tools by Python code: usage: smolagents_code.py PROMPT."""

import os
import sys

import shell
from smolagents import CodeAgent, OpenAIServerModel, tool


@tool
def bash(command: str) -> str:
    """Run a command.

    Args:
        command: the command
    """
    return shell.run(command)


model = OpenAIServerModel("default", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
print(CodeAgent(tools=[bash], model=model, max_steps=6).run(sys.argv[1]))
