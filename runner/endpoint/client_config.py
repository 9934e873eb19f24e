"""Settings of agent programs for an endpoint: environment variables, files and flags, with the tested versions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

__all__ = ["CLIENTS", "Address", "Client", "environ", "files", "flags", "pointers"]


@dataclass(frozen=True, slots=True)
class Address:
    """The address of an episode and the properties of its model, for a client."""

    base_url: str
    """The URL that ends with /v1, for OpenAI's clients."""
    root_url: str
    """`base_url` without /v1, for Anthropic's clients."""
    api_key: str
    """The API key."""
    model: str
    """Name of the model."""
    context: int
    """Maximum number of ids of prompt and answer together."""

    def fill(self, text: str) -> str:
        """Replace `{base_url}` and the other names of an address in a text."""
        for name, value in self._values().items():
            text = text.replace(f"{{{name}}}", str(value))
        return text

    def _values(self) -> dict[str, object]:
        """Return the names that `fill` replaces, with their values. Limits such as `output` depend on the context."""
        return {
            "base_url": self.base_url,
            "root_url": self.root_url,
            "api_key": self.api_key,
            "model": self.model,
            "context": self.context,
            "output": min(32_000, self.context // 4),
            "reserve": min(16_384, self.context // 4),
            "compact_at": self.context - min(16_384, self.context // 4),
            "kept": min(20_000, self.context // 4),
            "tool_output": min(10_000, self.context // 8),
        }


@dataclass(frozen=True, slots=True)
class Client:
    """An agent program, or a library for agents."""

    name: str
    """Name of the client."""
    tested: str
    """The tested version."""
    form: str
    """Name of the wire form that the client uses, as in the records of requests."""
    command: str = ""
    """Command of a program, as for `deltarunner run --agent`; "" for a library."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the client reads."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Contents of the files that the client reads, by their path in its home."""
    pointers: Mapping[str, str] = field(default_factory=dict)
    """Environment variables by which the client finds its files in the folder `{home}`, which is not its home."""
    flags: Sequence[str] = ()
    """Command-line flags for a program that does not read `files`, since it keeps its own home."""


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
            "models": {"{model}": {"name": "{model}", "limit": {"context": "#context#", "output": "#output#"}}},
        }
    },
}
_PI = {
    "providers": {
        "deltarunner": {
            "baseUrl": "{base_url}",
            "apiKey": "{api_key}",
            "api": "openai-completions",
            "models": [{"id": "{model}", "name": "{model}", "contextWindow": "#context#", "maxTokens": "#output#"}],
        }
    }
}
_PI_SETTINGS = {
    "defaultProvider": "deltarunner",
    "defaultModel": "{model}",
    "compaction": {"enabled": True, "reserveTokens": "#reserve#", "keepRecentTokens": "#kept#"},
}
_QWEN = {
    "security": {"auth": {"selectedType": "openai"}},
    "model": {"name": "{model}", "generationConfig": {"contextWindowSize": "#context#", "timeout": 3_600_000}},
    "general": {"enableAutoUpdate": False},
    "privacy": {"usageStatisticsEnabled": False},
}
_CODEX = """\
model = "{model}"
model_provider = "deltarunner"
model_context_window = {context}
model_auto_compact_token_limit = {compact_at}
tool_output_token_limit = {tool_output}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[features]
view_image = false  # a prompt here has only text

[model_providers.deltarunner]
name = "deltarunner"
base_url = "{base_url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
# Codex does not count the comments that it receives while it waits for the engine as events.
stream_idle_timeout_ms = 3600000
"""


_CODEX_FLAGS = (
    *("-m", "{model}"),
    *("-c", "model_provider=deltarunner"),
    *("-c", "model_context_window={context}"),
    *("-c", "model_auto_compact_token_limit={compact_at}"),
    *("-c", "tool_output_token_limit={tool_output}"),
    "-c",
    'model_providers.deltarunner={name="deltarunner",base_url="{base_url}",wire_api="responses",'
    "stream_idle_timeout_ms=3600000}",
)


def _json(value: object) -> str:
    return re.sub('"#([a-z_]+)#"', r"{\1}", json.dumps(value, indent=2))  # the values between # become numbers


CLIENTS: Final = (
    Client(
        "openai",
        "3.54.0",
        "chat",
        environ={
            "OPENAI_BASE_URL": "{base_url}",
            "OPENAI_API_BASE": "{base_url}",
            "OPENAI_API_KEY": "{api_key}",
            "OPENAI_MODEL": "{model}",
        },
    ),
    Client(
        "anthropic",
        "2.12.0",
        "anthropic",
        environ={
            "ANTHROPIC_BASE_URL": "{root_url}",
            "ANTHROPIC_AUTH_TOKEN": "{api_key}",
            "ANTHROPIC_MODEL": "{model}",
        },
    ),
    Client(
        "claude",
        "2.1.197",
        "anthropic",
        "claude --dangerously-skip-permissions -p {prompt}",
        {
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_OPUS_MODEL": "{model}",
            "ANTHROPIC_DEFAULT_SONNET_MODEL": "{model}",
            "API_TIMEOUT_MS": "3600000",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "{context}",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{output}",
            "CLAUDE_CODE_SUBAGENT_MODEL": "{model}",
            "DISABLE_AUTOUPDATER": "1",
            "ENABLE_TOOL_SEARCH": "false",
            "IS_SANDBOX": "1",
        },
    ),
    Client(
        "codex",
        "0.169.0",
        "responses",
        "codex exec --skip-git-repo-check {prompt}",
        files={".codex/config.toml": _CODEX},
        flags=_CODEX_FLAGS,
    ),
    Client(
        "opencode",
        "1.18.33",
        "chat",
        "opencode run {prompt}",
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        },
        {".config/opencode/opencode.json": _json(_OPENCODE)},
        {"OPENCODE_CONFIG": "{home}/.config/opencode/opencode.json"},
    ),
    Client(
        "qwen",
        "0.15.10",
        "chat",
        "qwen -y -p {prompt}",
        {"QWEN_CODE_NO_RELAUNCH": "1"},
        {".qwen/settings.json": _json(_QWEN)},
        {"QWEN_CODE_SYSTEM_SETTINGS_PATH": "{home}/.qwen/settings.json"},
    ),
    Client(
        "pi",
        "0.73.1",
        "chat",
        "pi -p {prompt}",
        {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        {".pi/agent/models.json": _json(_PI), ".pi/agent/settings.json": _json(_PI_SETTINGS)},
        {"PI_CODING_AGENT_DIR": "{home}/.pi/agent"},
    ),
    Client(
        "mini-swe-agent",
        "2.4.6",
        "chat",
        "mini -y --exit-immediately -t {prompt}",
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
        "chat",
        environ={"LLM_API_KEY": "{api_key}", "LLM_BASE_URL": "{base_url}", "LLM_MODEL": "openai/{model}"},
    ),
    Client("openai-agents", "0.24.0", "responses", environ={"OPENAI_AGENTS_DISABLE_TRACING": "1"}),
    Client("pydantic-ai", "2.68.0", "chat"),
    Client("smolagents", "1.26.0", "chat"),
    Client("langgraph", "1.2.22", "chat"),
    Client("autogen", "0.7.5", "chat"),
    Client("inspect-ai", "0.3.285", "chat"),
)
"""The tested clients, with their settings."""


def environ(address: Address) -> dict[str, str]:
    """Return the environment variables of all clients."""
    return {name: address.fill(value) for client in CLIENTS for name, value in client.environ.items()}


def files(address: Address) -> dict[str, str]:
    """Return the files of all clients, by their path in the home of a program."""
    return {path: address.fill(text) for client in CLIENTS for path, text in client.files.items()}


def flags(address: Address) -> dict[str, list[str]]:
    """Return the command-line flags of programs that do not read `files`, by the program's command."""
    return {
        client.command.split()[0]: [address.fill(flag) for flag in client.flags] for client in CLIENTS if client.flags
    }


def pointers(home: Path) -> dict[str, dict[str, str]]:
    """Return the environment variables by which each program finds its files in `home`, by the program's command."""
    return {
        client.command.split()[0]: {name: value.replace("{home}", str(home)) for name, value in client.pointers.items()}
        for client in CLIENTS
        if client.pointers
    }
