"""An OpenEnv server with a counting game, with the real package in its own interpreter. It prints its port."""

import os
import socket
import sys
import time

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Add(Action):
    number: int


class Total(Observation):
    text: str


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.total = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.total = kwargs.get("start", 0)
        return Total(text=f"seed {seed}, reach 10 from {self.total}", done=False)

    def step(self, action, timeout_s=None, **kwargs):
        if action.number == 66:
            raise RuntimeError("the counter is broken")
        if action.number == 77:
            time.sleep(1)
        if action.number == 88:
            os._exit(1)
        self.total += action.number
        return Total(text=f"it is {self.total}", done=self.total >= 10, reward=float(action.number))

    @property
    def state(self):
        return State()


class Tools(MCPEnvironment):
    """The same game with two tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("counting")
        self.total = 0

        @server.tool
        def add(number: int) -> str:
            """Add a number."""
            if number == 66:
                raise ValueError("the counter is broken")
            self.total += number
            if number == 99:
                raise ValueError("that was the end")
            return f"it is {self.total}"

        @server.tool
        def look() -> str:
            """Look at the total."""
            return f"still {self.total}"

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.total = 0
        return Observation(done=False, metadata={"seed": seed})

    async def step_async(self, action, timeout_s=None, **kwargs):
        before = self.total
        observation = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        if action.type == "call_tool":
            observation.reward, observation.done = float(self.total - before), self.total >= 10
        return observation

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    @property
    def state(self):
        return State()


def main():
    if sys.argv[1:] == ["tools"]:
        app = create_fastapi_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=8)
    else:
        app = create_fastapi_app(Counting, Add, Total, max_concurrent_envs=1 if sys.argv[1:] == ["one"] else 8)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main()
