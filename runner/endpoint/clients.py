"""What agent programs have to be told to ask an endpoint: variables and files, as data, with the versions tested."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

__all__ = ["CLIENTS", "Address", "Client", "environ", "files"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a client finds its episode."""

    base_url: str
    """The URL that ends with /v1, as OpenAI's clients want it."""
    root_url: str
    """The same without /v1, as Anthropic's clients want it."""
    api_key: str
    """The key."""
    model: str
    """The name of the model."""
    context: int
    """How many ids the model can have."""

    def fill(self, text: str) -> str:
        """The text with `{base_url}` and the other names of an address in it replaced."""
        for name in ("base_url", "root_url", "api_key", "model", "context"):
            text = text.replace(f"{{{name}}}", str(getattr(self, name)))
        return text


@dataclass(frozen=True, slots=True)
class Client:
    """An agent program, or a library of them."""

    name: str
    """Its name."""
    tested: str
    """The version that was tested."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """The variables that it reads."""
    files: Mapping[str, str] = field(default_factory=dict)
    """The files that it reads, by their path in its home."""


_OPENCODE = {
    "$schema": "https://opencode.ai/config.json",
    "model": "deltarunner/{model}",
    "small_model": "deltarunner/{model}",
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        "deltarunner": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "deltarunner",
            "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
            "models": {"{model}": {"name": "{model}", "limit": {"context": "#context#", "output": 8192}}},
        }
    },
}
_PI = {
    "providers": {
        "deltarunner": {
            "baseUrl": "{base_url}",
            "apiKey": "{api_key}",
            "api": "openai-completions",
            "models": [{"id": "{model}", "name": "{model}", "contextWindow": "#context#", "maxTokens": 8192}],
        }
    }
}
_CODEX = """\
model = "{model}"
model_provider = "deltarunner"
model_context_window = {context}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.deltarunner]
name = "deltarunner"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


def _json(value: object) -> str:
    return json.dumps(value, indent=2).replace('"#context#"', "{context}")


CLIENTS: Final = (
    Client(
        "openai",
        "3.54.0",
        {
            "OPENAI_BASE_URL": "{base_url}",
            "OPENAI_API_BASE": "{base_url}",
            "OPENAI_API_KEY": "{api_key}",
            "OPENAI_MODEL": "{model}",
        },
    ),
    Client(
        "anthropic",
        "2.12.0",
        {
            "ANTHROPIC_BASE_URL": "{root_url}",
            "ANTHROPIC_AUTH_TOKEN": "{api_key}",
            "ANTHROPIC_MODEL": "{model}",
        },
    ),
    Client(
        "claude",
        "2.1.197",
        {
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "API_TIMEOUT_MS": "3600000",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK": "1",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
            "DISABLE_AUTOUPDATER": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "IS_SANDBOX": "1",
        },
    ),
    Client("codex", "0.169.0", files={".codex/config.toml": _CODEX}),
    Client("opencode", "1.18.33", files={".config/opencode/opencode.json": _json(_OPENCODE)}),
    Client("qwen", "0.15.10"),
    Client("pi", "0.73.1", files={".pi/agent/models.json": _json(_PI)}),
    Client(
        "mini-swe-agent",
        "2.4.6",
        {
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_NAME": "openai/{model}",
            "MSWEA_SILENT_STARTUP": "1",
        },
    ),
    Client(
        "openhands",
        "1.16.0",
        {"LLM_API_KEY": "{api_key}", "LLM_BASE_URL": "{base_url}", "LLM_MODEL": "openai/{model}"},
    ),
)
"""The clients that an endpoint prepares for; others are told by `base_url` and `api_key`."""


def environ(address: Address) -> dict[str, str]:
    """The variables of all clients."""
    return {name: address.fill(value) for client in CLIENTS for name, value in client.environ.items()}


def files(address: Address) -> dict[str, str]:
    """The files of all clients, by their path in the home of a program."""
    return {path: address.fill(text) for client in CLIENTS for path, text in client.files.items()}
