"""BFCL v4, multi-turn: function calls over several requests, scored by the checker of the package bfcl_eval."""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from runner.environment.environment import Environment
from runner.episode.conversation import Conversation
from runner.errors import BadOption, BadTask, ToolError
from runner.interop.packages import optional_package
from runner.options import Limits
from runner.scoring import reward
from runner.tasks import Task
from runner.tools.tool import Tool

__all__ = ["Bfcl"]

CATEGORIES: Final = ("base", "miss_func", "miss_param", "long_context")
"""The categories of multi-turn tasks. Each has 200 tasks."""
MAX_STEPS_COUNT = 20
"""Maximum number of turns with calls for one request. As in BFCL, one more such turn ends the task with the score 0."""

_MORE_FUNCTIONS: Final = "I have updated some more functions you can choose from. What about now?"
"""The user's message when functions are added: BFCL's DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC."""
_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""The JSON Schema type for each BFCL type name that JSON Schema does not have."""
_MULTI_TURN: Final = "eval_checker.multi_turn_eval"


class Bfcl(Environment):
    """The multi-turn tasks of BFCL v4 (`--set category=base`): several requests, with calls of simulated APIs.

    The reward is 1 if BFCL's checker accepts the calls. After each request, the APIs must have the state that the
    reference calls lead to. The results of the calls must include the results of the reference calls.
    """

    package = ("bfcl_eval", "bfcl")
    limits = Limits(turns=200)

    def __init__(self, category: str = "base") -> None:
        """Choose the category.

        Args:
            category: base, miss_func (functions are added later), miss_param (arguments are added later) or
                long_context.

        Raises:
            BadOption: the category is unknown.
            BadEnvironment: the package is missing.
        """
        if category not in CATEGORIES:
            raise BadOption(f"category={category!r:.60}: give {', '.join(CATEGORIES)}.")
        _bfcl(f"{_MULTI_TURN}.multi_turn_checker")
        self._category = category
        self._entry: dict[str, Any] = {}
        # BFCL stores the objects of each API in a module, under names that begin with a model's name. Therefore each
        # episode has its own model name.
        self._model = f"episode_{uuid.uuid4().hex}"
        self._requests: list[list[list[str]]] = []
        self._ran: list[str] = []

    def tasks(self) -> Iterator[Task]:
        """The tasks of the category. The prompt of a task is its first request."""
        return (Task(id=name, prompt=entry["question"][0]) for name, entry in _entries(self._category).items())

    def setup(self) -> None:
        """Find the task in BFCL's data, and make a tool of each of its functions.

        Raises:
            BadTask: the category has no task with this id.
        """
        entry = _entries(self._category).get(self.task.id)
        if entry is None:
            raise BadTask(f"task {self.task.id!r:.80} is not in the category {self._category!r}: correct the id.")
        self._entry = entry
        self.tools += [self._tool(each) for each in entry["function"]]

    async def rollout(self, conversation: Conversation) -> None:
        """Send each request after the model has answered the previous one without a call."""
        for number, request in enumerate(self._entry["question"]):
            added = self._entry["missed_function"].get(str(number))
            if added:
                conversation.replace(tools=[*conversation.tools, *map(self._tool, added)])
            if number:
                conversation.add(request if request else _MORE_FUNCTIONS)
            self._requests.append([])
            await self._answer(conversation)

    async def _answer(self, conversation: Conversation) -> None:
        for _ in range(MAX_STEPS_COUNT + 1):
            turn = await conversation.generate()
            if not turn.tool_calls:
                return
            conversation.add(*await conversation.call_tools(turn))
            ran, self._ran = self._ran, []
            if ran:
                self._requests[-1].append(ran)
        self._requests.clear()
        self.episode.end("too_many_steps")

    @reward
    def accuracy(self) -> float:
        """1 if BFCL's checker accepts the calls, else 0; also 0 if a request was not reached or took too many turns."""
        right = self._entry["ground_truth"]
        if len(self._requests) != len(right):
            return 0.0
        check = _bfcl(f"{_MULTI_TURN}.multi_turn_checker").multi_turn_checker
        return float(check(self._requests, right, self._entry, f"multi_turn_{self._category}", self._model)["valid"])

    def close(self) -> None:
        """Free the objects that BFCL keeps for this episode."""
        kept = vars(_bfcl(f"{_MULTI_TURN}.multi_turn_utils"))
        # The names are copied, since other threads add names at the same time.
        for name in [name for name in list(kept) if name.startswith(self._model)]:
            del kept[name]

    def _tool(self, described: Mapping[str, Any]) -> Tool:
        return Tool(
            functools.partial(self._call, described["name"]),
            name=described["name"],
            description=described["description"],
            parameters=_schema(described["parameters"]),
            raw=True,
            checked=False,  # BFCL itself answers calls with wrong arguments
            parallel=False,  # the calls of a turn change the same objects, so they run in order
        )

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        unusable = [each for each in arguments if not each.isidentifier()]
        if unusable:  # BFCL would evaluate such a name as Python code
            raise ToolError(f"unknown argument {unusable[0]!r:.60}")
        written = f"{name}({', '.join(f'{each}={value!r}' for each, value in arguments.items())})"
        self._ran.append(written)
        results, _ = _bfcl(f"{_MULTI_TURN}.multi_turn_utils").execute_multi_turn_func_call(
            [written],
            self._entry["initial_config"],
            self._entry["involved_classes"],
            self._model,
            self._entry["id"],
            long_context=self._category == "long_context",
        )
        return str(results[0])


def _schema(described: Any) -> Any:
    """Return the JSON schema for BFCL's description of parameters."""
    if isinstance(described, list):
        return [_schema(each) for each in described]
    if not isinstance(described, Mapping):
        return described
    changed = {name: _schema(value) for name, value in described.items()}
    if isinstance(changed.get("type"), str):
        changed["type"] = _TYPES.get(changed["type"], changed["type"])
    return changed


@functools.cache
def _entries(category: str) -> dict[str, dict[str, Any]]:
    """The tasks by id, each with its functions, the functions that are added later, and the reference calls."""
    constants = _bfcl("constants.executable_backend_config")
    data = Path(constants.__file__).parents[1] / "data"
    right = {each["id"]: each["ground_truth"] for each in _lines(data / "possible_answer" / _file(category))}
    entries = {}
    for entry in _lines(data / _file(category)):
        files = [constants.MULTI_TURN_FUNC_DOC_FILE_MAPPING[each] for each in entry["involved_classes"]]
        functions = [each for file in files for each in _lines(data / "multi_turn_func_doc" / file)]
        added = entry.get("missed_function", {})
        missed = {name for names in added.values() for name in names}
        entries[entry["id"]] = entry | {
            "ground_truth": right[entry["id"]],
            "function": [each for each in functions if each["name"] not in missed],
            "missed_function": {
                number: [each for each in functions if each["name"] in names] for number, names in added.items()
            },
        }
    return entries


def _file(category: str) -> str:
    return f"BFCL_v4_multi_turn_{category}.json"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _bfcl(module: str) -> Any:
    return optional_package(f"bfcl_eval.{module}", extra="bfcl", package="bfcl-eval", then="--no-deps bfcl-eval")
