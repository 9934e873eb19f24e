"""An agent of langgraph, by langchain-openai: usage: langgraph_agent.py PROMPT."""

import sys

import shell
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def bash(command: str) -> str:
    """Run a command."""
    return shell.run(command)


agent = create_agent(ChatOpenAI(model="default", streaming=True), [bash], system_prompt="You run commands.")
print(agent.invoke({"messages": [("user", sys.argv[1])]})["messages"][-1].content)
