"""The code agrees with the statements of the pages."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import pytest

import runner
from runner import BackgroundPlayer, Concurrency, Environment, Outcome, Player, Run, Sampling, ScriptedEngine, reward
from runner.environment.loading import bundled_environments, find_environment
from runner.testing import Replies, call
from tests import module_list
from tests.benchmarks.__main__ import NAMES
from tests.repository import DOCS, ROOT

PAGE = (DOCS / "environments.md").read_text()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_default_rollout_is_in_the_docs_word_for_word() -> None:
    assert inspect.getsource(Environment.rollout) in blocks()


def test_every_outcome_is_explained() -> None:
    for outcome in Outcome:
        assert f"`{outcome.value}`" in PAGE


@pytest.mark.parametrize("start", [ROOT / "README.md", DOCS / "index.md"], ids=["README", "site"])
def test_every_guide_is_linked_from_the_start(start: Path) -> None:
    linked = {(start.parent / link).resolve() for link in re.findall(r"\]\(([\w/-]+\.md)\)", start.read_text())}
    assert set(DOCS.glob("*.md")) - {DOCS / "index.md"} <= linked


def test_guides_that_name_a_class_link_into_the_reference() -> None:
    """A page whose prose names a public class links to the reference. The page on the inside is left out."""
    classes = "|".join(name for name in runner.__all__ if inspect.isclass(getattr(runner, name)))
    unlinked = []
    for page in sorted(set(DOCS.glob("*.md")) - {DOCS / "architecture.md"}):
        text = page.read_text(encoding="utf-8")
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        if re.search(rf"`({classes})\b", prose) and "](reference/" not in prose:
            unlinked.append(page.name)
    assert unlinked == []


def test_every_benchmark_is_in_the_table_of_its_page_and_no_other() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    table = page.split("| name | what it measures |\n|---|---|\n")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)) == sorted(NAMES)


@pytest.mark.anyio
async def test_the_first_environment_of_the_page_plays(tmp_path: Path) -> None:
    source = tmp_path / "calculator.py"
    source.write_text(blocks()[0])
    names: dict[str, Any] = {"__name__": "calculator"}
    exec(compile(blocks()[0], str(source), "exec"), names)
    environment = names["Calculator"]()
    engine = ScriptedEngine([[call("multiply", a=3, b=10)], "It is 30"])
    async with Run(environment, engine, tasks=[environment.tasks()[3]]) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert trajectory.reward == 1
    assert environment.multiply(6, 7) == 42


def defined(name: str, folder: Path) -> Any:
    """Return a class that a block of the page defines. It is loaded from a file, since a tool's source is read."""
    source = folder / f"block_{name.lower()}.py"
    source.write_text(next(block for block in blocks() if f"class {name}" in block))
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


@pytest.mark.anyio
async def test_task_with_own_fields_and_a_curriculum_play(tmp_path: Path) -> None:
    sums, curriculum = defined("Sums", tmp_path), defined("Curriculum", tmp_path)()
    async with Run(sums, ScriptedEngine("2")) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1), trajectory.error
    assert trajectory.segments[0].messages[0]["content"] == "Answer with a number below 12."

    class Easy(Environment):
        @reward
        def right(self) -> bool:
            return self.task.id == "0"

    async with Run(Easy, ScriptedEngine("2"), tasks=curriculum, concurrency=Concurrency(episodes=1)) as run:
        asked = [trajectory.task.prompt async for trajectory in run]
    assert asked[0] == "What is 10 + 1?"
    assert asked[-1] == "What is 199 + 1?", "the question is of the next level"


@pytest.mark.anyio
async def test_line_of_a_task_file_on_the_page_plays(tmp_path: Path) -> None:
    (line,) = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "tasks.jsonl").write_text(line)
    async with Run(defined("Sums", tmp_path), ScriptedEngine("2"), tasks=tmp_path / "tasks.jsonl") as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1), trajectory.error


def test_limits_of_turns_on_the_page_are_those_of_the_environments() -> None:
    sentence = PAGE.split("Some bundled environments limit the turns:")[1].split(". `--limit")[0]
    shown: dict[str, int] = {}
    for names, number in re.findall(r"(.*?)\b(\d+)", sentence, flags=re.DOTALL):
        shown |= dict.fromkeys(re.findall(r"`(\w+)`", names), int(number))
    names = [bundled.name for bundled in bundled_environments() if bundled.usable]
    limits = {name: find_environment(name).limits.turns for name in names}
    terminal: Any = find_environment("terminal")
    limits["terminal"] = terminal(image="debian").limits.turns
    assert shown == {name: turns for name, turns in limits.items() if isinstance(turns, int)}


@pytest.mark.parametrize(
    ("page", "owners", "number"), [("testing.md", (runner.testing,), 4), ("trainers.md", (BackgroundPlayer, Player), 3)]
)
def test_signatures_on_a_page_are_those_of_the_code(page: str, owners: tuple[Any, ...], number: int) -> None:
    shown = re.findall(r"`(\w+)(\([^`]*\*,[^`]*\))`", (DOCS / page).read_text(encoding="utf-8"))
    assert len(shown) == number
    for name, parameters in shown:
        found = {signature_of(getattr(owner, name)) for owner in owners if hasattr(owner, name)}
        assert found == {" ".join(parameters.split())}, name


def signature_of(function: Any) -> str:
    """Return the parameters of a function without `self` and types, as the pages show them."""
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    plain = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(plain)).replace("'", '"')


@pytest.mark.anyio
async def test_episode_of_the_page_has_tools_of_setup_and_a_group_reward(tmp_path: Path) -> None:
    hunt = defined("Hunt", tmp_path)
    barn, well = call("look", place="barn"), call("look", place="well")
    looks: Replies = [[barn], "Nowhere.", [well], [barn]]
    async with Run(hunt, ScriptedEngine(looks), group_size=2) as run:
        (group,) = [group async for group in run.groups()]
    for trajectory in group.trajectories:
        assert (trajectory.outcome, trajectory.reason, trajectory.reward) == (Outcome.COMPLETED, "found", 1.0)
        assert trajectory.turns[0].reward == 1.0


# --- the reference


PACKAGES = ("runner", "runner.testing", "runner.training", "runner.generation", "runner.interop")
MODULES = (
    "runner.runs.options",
    "runner.store.export",
    "runner.testing.engine_contract",
    "runner.testing.strategies",
    "runner.trainers.observers",
    "runner.trainers.openenv",
    "runner.trainers.trace_check",
    "runner.trainers.trace_files",
    "runner.trainers.trace_scores",
    "runner.trainers.trl",
    "runner.trainers.verifiers_server",
    "runner.training.grammar_torch",
    "runner.training.tree_attention",
    "runner.training.tree_torch",
)
"""Modules whose names users import from there: keyword arguments of `Run`, and names that need torch or hypothesis."""
UNSAID = ("Exporter", "PARQUET_COLUMNS", "RunKeywords", "check_engine", "check_full", "tree_attention")
"""Names of `MODULES` that only the library itself imports."""
WITHIN = (
    "runner.cluster.driver.Driver",
    "runner.cluster.run_setups.RunSetups",
    "runner.concurrency.clocks.Progress",
    "runner.concurrency.clocks.Waiting",
    "runner.endpoint.episode_route.EpisodeRoute",
    "runner.endpoint.client_config.Address",
    "runner.engines.scripted.run_files.RecordedRun",
    "runner.engines.state.CheckedUpdate",
    "runner.episode.chat_service.ChatService",
    "runner.episode.state.ConversationState",
    "runner.episode.state.EpisodeState",
    "runner.generation.formats.Batch",
    "runner.generation.rows.RunningRows",
    "runner.interop.judging.JudgeCost",
    "runner.runs.options.RunKeywords",
    "runner.runs.player.Attempt",
    "runner.runs.run_setup.RunSetup",
)
"""Names in annotations that users do not need: arguments of the library's own classes, the keywords of `RunOptions`,
and a run file as engines receive it.
"""
ROWS = ("runner.store.reader.EpisodeRow",)
"""Classes whose fields are explained by the table of columns, and so by docs/run-file.md."""
REFERENCE = DOCS / "reference"


def in_the_reference() -> list[str]:
    """Names in the pages of the reference, with their package."""
    pages = (page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page, flags=re.MULTILINE)]


@pytest.fixture(scope="module")
def documented() -> griffe.Module:
    """The package as the reference is built from it: parsed, not imported."""
    loaded = griffe.load("runner", search_paths=[str(ROOT)], docstring_parser="google")
    assert isinstance(loaded, griffe.Module)
    return loaded


def test_reference_has_every_public_name_and_no_other(
    documented: griffe.Module,
) -> None:
    public = [f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__]
    for module in MODULES:
        public += [f"{module}.{name}" for name in importlib.import_module(module).__all__ if name not in UNSAID]
    there = in_the_reference()
    assert len(there) == len(set(there))
    assert set(public) <= set(there)
    on_pages = {defined_as(documented, name).path: defined_as(documented, name) for name in there}
    named = [defined_as(documented, name) for thing in on_pages.values() for name in held_by(thing)]
    held = {thing.path: thing for thing in named}
    assert set(there) - set(public) <= set(held), "the reference does not document it"
    missing = [path for path, thing in held.items() if path not in on_pages and not is_said(thing, set(on_pages))]
    assert sorted(missing) == sorted(WITHIN)


def defined_as(documented: griffe.Module, name: str) -> griffe.Object:
    """The definition of a name of the package."""
    named = documented[name.removeprefix("runner.")]
    assert isinstance(named, griffe.Object | griffe.Alias)
    return named.final_target if isinstance(named, griffe.Alias) else named


def is_said(thing: griffe.Object, on_pages: set[str]) -> bool:
    """True if the reference need not list the name: it is private, a type variable, or a subclass of a listed class."""
    if isinstance(thing, griffe.Attribute):
        return thing.name.startswith("_") or str(thing.value).startswith("TypeVar(")
    return isinstance(thing, griffe.Class) and any(base.path in on_pages for base in thing.mro())


def held_by(thing: griffe.Object) -> Iterator[str]:
    """The package's names in the annotations of a thing and of its public members, including inherited ones."""
    parts: list[griffe.Object | griffe.Alias] = [thing]
    if isinstance(thing, griffe.Class):
        inner = thing.all_members.values()
        parts += [part for part in inner if part.is_public or part.name in ("__init__", "__iter__", "__anext__")]
    for part in parts:
        for annotation in annotated(part):
            if isinstance(annotation, griffe.Expr):
                named = (one for one in annotation.iterate(flat=True) if isinstance(one, griffe.ExprName))
                yield from (one.canonical_path for one in named if one.canonical_path.startswith("runner."))


def annotated(part: griffe.Object | griffe.Alias) -> Iterator[str | griffe.Expr | None]:
    """The annotations of one function or attribute, and the value of a type alias."""
    if part.is_function:
        yield part.returns
        yield from (parameter.annotation for parameter in part.parameters)
    elif part.is_attribute:
        yield part.annotation
        if part.annotation is not None and str(part.annotation) == "TypeAlias":
            yield part.value


def members(thing: griffe.Object | griffe.Alias) -> Iterator[griffe.Object | griffe.Alias]:
    """The public members of a class, also of an error or an enum."""
    for member in thing.members.values():
        if not member.name.startswith("_") and not member.is_alias:
            yield member


def test_every_name_and_member_of_the_reference_has_a_docstring(documented: griffe.Module) -> None:
    silent = []
    for name in in_the_reference():
        thing = defined_as(documented, name)
        if thing.docstring is None:
            silent.append(name)
        if isinstance(thing, griffe.Class) and name not in ROWS:
            silent += [f"{name}.{each.name}" for each in members(thing) if not is_documented(thing, each.name)]
    assert silent == []


def is_documented(thing: griffe.Class, name: str) -> bool:
    """True if the class, or a class that it inherits from, documents this member."""
    owners = [owner for owner in (thing, *thing.mro()) if name in owner.members]
    return any(owner.members[name].docstring is not None for owner in owners)


# --- sampling

SAMPLING = (DOCS / "sampling.md").read_text()


def test_every_field_of_sampling_is_on_its_page_with_its_default() -> None:
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", SAMPLING, flags=re.MULTILINE)
    page_defaults: dict[str, str] = {}
    for names, defaults in rows:
        fields, values = re.findall(r"`(\w+)`", names), defaults.split(", ")
        page_defaults.update(zip(fields, values * len(fields) if len(values) == 1 else values, strict=False))
    assert page_defaults == {
        name: f"{value:g}" if type(value) is float else str(value) for name, value in DEFAULTS.items()
    }


DEFAULTS = Sampling.defaults().given()


@pytest.mark.anyio
async def test_the_environment_of_the_page_on_sampling_plays() -> None:
    names: dict[str, Any] = {"__name__": "poem"}
    (block,) = re.findall(r"```python\n(.*?)```", SAMPLING, flags=re.DOTALL)
    exec(compile(block, "poem.py", "exec"), names)
    async with Run(names["Poem"], ScriptedEngine("Dark.")) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert re.match(r"9 ids, .* log-probability -\d\.\d\d$", trajectory.reason)


# --- the architecture


def rows_of_the_architecture() -> list[list[str]]:
    """Packages and single modules of each row of the architecture table."""
    table = (DOCS / "architecture.md").read_text(encoding="utf-8").split("| row | contents |\n|---|---|\n")[1]
    return [re.findall(r"`([\w/]+)`", row.split(" | ", maxsplit=1)[0]) for row in table.split("\n\n")[0].splitlines()]


def test_architecture_rows_are_those_of_lint_imports() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (contract["layers"] for contract in contracts if contract.get("containers") == ["runner"])
    rows = [[name.removesuffix("/") for name in names] for names in rows_of_the_architecture()]
    assert [names for names in rows if "/" not in names[0]] == [layer.split(" : ") for layer in layers]


def test_architecture_has_every_package_and_lists_every_module() -> None:
    folders = {f"{file.parent.relative_to(ROOT / 'runner')}/" for file in (ROOT / "runner").rglob("__init__.py")}
    listed = [name for names in rows_of_the_architecture() for name in names if name.endswith("/")]
    assert sorted(listed) == sorted(folders - {"./"})

    page = module_list.on_page_markdown((DOCS / "architecture.md").read_text(encoding="utf-8"))
    tables = re.findall(r"^### (\S+/)\n(.*?)(?=^#|\Z)", page, flags=re.MULTILINE | re.DOTALL)
    listed = [f"{package}{name}.py" for package, rows in tables for name in re.findall(r"\n\| `(\w+)` \|", rows)]
    modules = [str(file.relative_to(ROOT)) for file in (ROOT / "runner").rglob("*.py") if file.stem != "__init__"]
    assert sorted(listed) == sorted(modules)


def test_no_module_is_longer_than_the_habits_of_this_code_allow() -> None:
    (most,) = re.findall(r"At (\d+) lines it is split", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    long = {
        str(module.relative_to(ROOT)): lines
        for folder in ("runner", "envs", "tests", "examples")
        for module in (ROOT / folder).rglob("*.py")
        if (lines := len(module.read_text(encoding="utf-8").splitlines())) > int(most)
    }
    assert long == {}
