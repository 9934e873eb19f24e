"""Engines of single agents: `--engine judge=api:MODEL`."""

from __future__ import annotations

from runner.cli.name_values import parse_pairs
from runner.cli.settings import RunSettings
from runner.engines.base import BaseEngine
from runner.errors import BadOption

__all__ = ["agent_engines"]

API = "api:"
"""The beginning of an engine that is a chat API."""


def agent_engines(settings: RunSettings) -> dict[str, BaseEngine]:
    """The engines of agents, by name: `api:MODEL`, `api:MODEL@URL` or `MODEL@URL`.

    Raises:
        BadOption: an engine cannot be read, or its package is missing.
    """
    given = parse_pairs(settings.engines, "--engine")
    return {agent: _engine(agent, value, settings) for agent, value in given.items()}


def _engine(agent: str, value: str, settings: RunSettings) -> BaseEngine:
    model, at, url = value.removeprefix(API).rpartition("@") if "@http" in value else (value.removeprefix(API), "", "")
    if not model:
        raise BadOption(f"--engine {agent}={value}: name the model: api:MODEL, api:MODEL@URL or MODEL@URL.")
    if value.startswith(API):
        from runner.engines.chat.engine import ChatEngine
        from runner.engines.chat.server import require_openai

        require_openai()
        return ChatEngine(model, base_url=url or None, api_key=settings.api_key or None)
    if not at:
        raise BadOption(
            f"--engine {agent}={value}: give api:{value} for a chat API, or {value}@http://HOST:PORT for a server of "
            "vLLM or SGLang; without --engine, the run's own engine plays the agent."
        )
    from runner.engines.remote.engine import RemoteEngine
    from runner.engines.remote.server import require_aiohttp

    require_aiohttp()
    return RemoteEngine(url, model, api_key=settings.server_key or None)
