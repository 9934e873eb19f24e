"""An agent of inspect-ai: usage: inspect_agent.py PROMPT."""

import os
import sys

import shell
from inspect_ai import Task, eval
from inspect_ai.agent import react
from inspect_ai.dataset import Sample
from inspect_ai.tool import tool


@tool
def bash():
    async def execute(command: str) -> str:
        """Run a command.

        Args:
            command: the command
        """
        return shell.run(command)

    return execute


(log,) = eval(
    Task([Sample(sys.argv[1])], solver=react(tools=[bash()])),
    model="openai-api/deltarunner/default",
    model_base_url=os.environ["OPENAI_BASE_URL"],
    model_args={"api_key": os.environ["OPENAI_API_KEY"]},
    message_limit=20,
    display="none",
    log_dir="logs",
)
print(log.status)
sys.exit(log.status != "success")
