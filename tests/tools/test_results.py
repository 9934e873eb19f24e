"""Results of the Model Context Protocol from a real server and from other clients, as text for a model."""

from __future__ import annotations

import base64
import dataclasses
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ReadResourceResult,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from runner import Environment, Outcome, Task, Tool, ToolError, reward
from runner.testing import call
from runner.tools.results import result_text
from tests.playing import play

pytestmark = pytest.mark.anyio

SERVER = Path(__file__).parents[1] / "episode" / "mcp_server.py"
TEXT = TextContent(type="text", text="Sunny.")
IMAGE = ImageContent(type="image", data=base64.b64encode(b"0" * 300).decode(), mime_type="image/png")
LINK = ResourceLink(type="resource_link", name="Map", uri="file:///map")
PAGE = TextResourceContents(uri="file:///a", text="A page.", mime_type="text/plain")
BLOB = BlobResourceContents(uri="file:///b", blob="AAAA", mime_type="image/gif")


@dataclasses.dataclass
class OfAnotherClient:
    content: list[Any]
    structured_content: Any = None
    data: Any = None
    is_error: bool = False


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (CallToolResult(content=[TEXT]), "Sunny."),
        (CallToolResult(content=[TEXT, TextContent(type="text", text="Warm.")]), "Sunny.\n\nWarm."),
        (CallToolResult(content=[]), "(empty)"),
        (CallToolResult(content=[TextContent(type="text", text="")]), "(empty)"),
        (CallToolResult(content=[TEXT, IMAGE]), "Sunny.\n\n[image, image/png, 300 bytes]"),
        (
            CallToolResult(content=[AudioContent(type="audio", data="AAAA", mime_type="audio/wav")]),
            "[audio, audio/wav, 3 bytes]",
        ),
        (CallToolResult(content=[LINK]), "[resource Map: file:///map]"),
        (
            CallToolResult(content=[LINK.model_copy(update={"description": "Streets of Oslo."})]),
            "[resource Map: file:///map: Streets of Oslo.]",
        ),
        (CallToolResult(content=[EmbeddedResource(type="resource", resource=PAGE)]), "A page."),
        (
            CallToolResult(content=[EmbeddedResource(type="resource", resource=BLOB)]),
            "[resource file:///b, image/gif, 3 bytes]",
        ),
        (CallToolResult(content=[], structured_content={"t": 3}), '{"t": 3}'),
        (CallToolResult(content=[TEXT], structured_content={"t": 3}), 'Sunny.\n\n{"t": 3}'),
        (
            CallToolResult(content=[TextContent(type="text", text='{"t":3}')], structured_content={"t": 3}),
            '{"t":3}',
        ),
        (CallToolResult(content=[TextContent(type="text", text="3")], structured_content={"result": 3}), "3"),
        (
            CallToolResult(
                content=[TextContent(type="text", text="1"), TextContent(type="text", text="2")],
                structured_content={"result": [1, 2]},
            ),
            "1\n\n2",
        ),
        ([TEXT, IMAGE], "Sunny.\n\n[image, image/png, 300 bytes]"),
        (TEXT, "Sunny."),
        (ReadResourceResult(contents=[PAGE, BLOB]), "A page.\n\n[resource file:///b, image/gif, 3 bytes]"),
        (OfAnotherClient([TEXT], {"result": "Sunny."}), "Sunny."),
        ({"content": [{"type": "text", "text": "Sunny."}], "isError": False}, "Sunny."),
        (CallToolResult(content=[TEXT]).model_dump(), "Sunny."),
        (CallToolResult(content=[TEXT]).model_dump(by_alias=True), "Sunny."),
        # An author's values that resemble an MCP result.
        ([{"type": "resource", "name": "iron"}], '[{"type": "resource", "name": "iron"}]'),
        ([{"type": "text", "text": "x"}], '[{"type": "text", "text": "x"}]'),
        ({"content": ["a"], "type": "text"}, '{"content": ["a"], "type": "text"}'),
        ({"contents": [{"uri": "a"}]}, '{"contents": [{"uri": "a"}]}'),
        ([], "[]"),
    ],
)
def test_mcp_result_becomes_its_text(value: object, text: str) -> None:
    assert result_text(value) == text


@pytest.mark.parametrize(
    "value",
    [
        CallToolResult(content=[TEXT], is_error=True),
        OfAnotherClient([TEXT], is_error=True),
        {"content": [{"type": "text", "text": "Sunny."}], "isError": True},
    ],
)
def test_failed_mcp_call_is_an_error_for_the_model(value: object) -> None:
    with pytest.raises(ToolError, match=r"^Sunny\.$"):
        result_text(value)


class Remote(Environment):
    """The environment of the guide."""

    server = StdioServerParameters(command=sys.executable, args=[str(SERVER)])

    def tasks(self) -> list[Task]:
        return [Task(id="sum", prompt="What is 1 + 2?")]

    async def setup(self) -> None:
        self.client = await self.episode.exit_stack.enter_async_context(Client(self.server))
        for each in (await self.client.list_tools()).tools:
            ask = partial(self.client.call_tool, each.name)
            schema: dict[str, Any] = {"parameters": each.input_schema, "returns": each.output_schema}
            self.tools.append(Tool(ask, name=each.name, description=each.description or "", raw=True, **schema))

    @reward
    def right(self) -> bool:
        return "3" in self.episode.text


async def test_real_mcp_server_answers_and_reports_failures() -> None:
    trajectory = await play(Remote, [call("add", a=1, b=2), call("fail"), "3"])
    said = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert said[0] == "3"
    assert "no such town" in said[1]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1.0)


def test_mcp_results_import_no_mcp_client() -> None:
    program = "import sys, runner.tools.results as r; r.result_text({'a': [1]}); sys.exit('mcp' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
