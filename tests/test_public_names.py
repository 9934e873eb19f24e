"""The public names, and the cost of importing them."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import runner
from runner import errors, generation, interop, training
from tests.repository import ROOT

PACKAGE = ROOT / "runner"
HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "ray",
    "aiohttp",
    "tokenizers",
    "pyarrow",
    "anyio",
    "pydantic",
    "rich",
    "typer",
)
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
ROWS = next(contract["layers"] for contract in CONTRACTS if contract.get("containers") == ["runner"])


def test_public_names_are_the_listed_ones() -> None:
    assert runner.__all__ == sorted(runner.__all__)
    authors = "Conversation Environment Episode Group Task Tool Turn group_reward metric reward tool"
    running = (
        "BackgroundPlayer ChatEngine Concurrency Engine FleetWorker History HistoryPolicy Limits MessageEngine Player "
        "RayEngine RayEngines RemoteEngine RetryPolicy Run RunFile RunObserver Sampling ScriptedEngine "
        "ServerDialect Summary TaskSource VllmEngine run"
    )
    records = "FinishReason Message Outcome Prompt Reply Segment ToolCall Trajectory Usage"
    streamed = "ContentPiece ReasoningPiece StreamedTurn ToolCalled TurnEvent TurnRestarted"
    served = "ChatThread Containers Endpoint Executed FinishedProgram Sandbox SandboxOptions SandboxProvider"
    tokens = "PrefixReplacement PrefixResult replace_prefix_tokens"
    engines = "Delta DeltaStream Finish GenerationRequest Session"
    functions = "LogprobsKind TokenEngine TokenFeature TokenFunction TokenOutput TokenSampling"
    control = "EngineState EngineStats LocalTransfer PauseMode WeightTransfer WeightUpdate"
    proofs = "ProofFigures ProofTolerance WeightProof"
    assert set(runner.__all__) == {
        *f"{authors} {running} {records} {streamed} {served} {tokens} {engines} {functions} {control} {proofs}".split(),
        *errors.__all__,
    }
    assert set(runner.__all__) <= set(dir(runner))
    for name in runner.__all__:
        assert getattr(runner, name) is not None


def test_public_names_for_trainers_are_the_listed_ones() -> None:
    assert set(training.__all__) == {
        "AdvantageRule",
        "CheckedTensor",
        "GrammarMasks",
        "InexactRows",
        "Mismatch",
        "Pool",
        "Pools",
        "RecordedMasks",
        "SampleRow",
        "Saving",
        "SegmentChoice",
        "Selection",
        "SequenceMean",
        "TokenMasks",
        "TensorVerdict",
        "TokenTree",
        "TrainingBatch",
        "TrainingTensors",
        "Way",
        "WeightReport",
        "by_turn",
        "check_weights",
        "dr_grpo",
        "gae",
        "grouped",
        "grpo",
        "icepop",
        "mismatch",
        "ratios",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "rloo",
        "sample_rows",
        "sequence_mask",
        "shared_credit",
        "tis",
        "turn_returns",
        "weight_proof",
    }
    assert set(generation.__all__) == {
        "BatchResults",
        "ColocationConfig",
        "Generation",
        "GenerationConfig",
        "GenerationDatumSpec",
        "GenerationOutputSpec",
        "TextDatumSpec",
        "TextOutputSpec",
        "verify_right_padding",
    }
    sandboxes = "Harbor SandboxedProgram Terminal"
    servers = "McpDataset McpServers ServerOption"
    scores = "Judge ScoreName ScoreOption ScoringFunction judge"
    games = "Gymnasium OpenEnv TextArena"
    benchmarks = "Bfcl Tau2 Verifiers"
    others = "Dataset Mixture MixturePart"
    assert set(interop.__all__) == {*f"{servers} {scores} {games} {benchmarks} {sandboxes} {others}".split()}
    for package in (training, generation, interop):
        assert package.__all__ == sorted(package.__all__)


def test_imports_of_trainers_load_no_model_library() -> None:
    names = loaded_by("import runner.training, runner.generation")
    assert names.isdisjoint({"torch", "transformers", "vllm", "xgrammar"})


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Agent"):
        getattr(runner, "Agent")  # noqa: B009  # a type checker knows better


def test_the_version_is_that_of_the_distribution() -> None:
    pyproject = ROOT / "pyproject.toml"
    assert f'version = "{runner.__version__}"' in pyproject.read_text()


def loaded_by(code: str) -> set[str]:
    """Modules that are loaded after `code` ran in a new interpreter."""
    script = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import runner").isdisjoint(HEAVY)


def test_no_public_name_loads_the_engine() -> None:
    names = loaded_by("import runner\nfor name in runner.__all__: getattr(runner, name)")
    assert names.isdisjoint({"torch", "transformers", "vllm", "ray"})


def test_no_module_takes_a_public_name_from_the_root_package() -> None:
    """The root loads its names lazily, so the check of layers cannot follow such an import."""
    taken = [
        f"{path.relative_to(PACKAGE)}: {alias.name}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "runner"
        for alias in node.names
        if not any((PACKAGE / name).exists() for name in (alias.name, f"{alias.name}.py"))
    ]
    assert taken == []


def test_no_module_reaches_what_is_above_it_by_a_text_at_run_time() -> None:
    """The check of layers cannot follow an import by a string, or an attribute of the loaded package."""
    found = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in taken_by_text(path.read_text(encoding="utf-8"))
        if not is_below(path, name)
    ]
    assert found == []


def taken_by_text(code: str) -> Iterator[str]:
    """The modules of the package that code takes from `sys.modules` or imports by a string."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case (
                ast.Subscript(value=ast.Attribute(attr="modules"), slice=ast.Constant(value=str(name)))
                | ast.Call(func=ast.Attribute(value=ast.Attribute(attr="modules")), args=[ast.Constant(str(name)), *_])
                | ast.Call(func=ast.Name("__import__" | "import_module"), args=[ast.Constant(str(name)), *_])
                | ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(str(name)), *_])
            ) if name.split(".")[0] in ("", "runner"):
                yield name


def is_below(path: Path, name: str) -> bool:
    """True if the module with this name is in a lower row than the file."""
    row_of = {each: number for number, row in enumerate(ROWS) for each in re.split(" [:|] ", row)}
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    return name.count(".") > 0 and row_of[own] < row_of.get(name.split(".")[1], -1)


@pytest.mark.parametrize(
    "code",
    [
        'sys.modules["runner"]',
        'sys.modules.get("runner.store")',
        'importlib.import_module("runner.store.reader")',
        'importlib.import_module(".store.reader", "runner")',
        'import_module("runner.runs")',
        '__import__("runner.store")',
    ],
)
def test_a_text_that_names_what_is_above_is_found(code: str) -> None:
    (name,) = taken_by_text(code)
    assert not is_below(PACKAGE / "engines" / "base.py", name)
