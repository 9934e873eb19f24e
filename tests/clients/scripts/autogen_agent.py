"""An agent of autogen: usage: autogen_agent.py PROMPT."""

import asyncio
import os
import sys

import shell
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient

CAN = {"vision": False, "function_calling": True, "json_output": False, "family": "unknown", "structured_output": False}


async def bash(command: str) -> str:
    """Run a command."""
    return shell.run(command)


async def main() -> None:
    client = OpenAIChatCompletionClient(
        model="default",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        model_info=CAN,
    )
    agent = AssistantAgent("worker", client, tools=[bash], system_message="You run commands.", max_tool_iterations=6)
    print((await agent.run(task=sys.argv[1])).messages[-1])


asyncio.run(main())
