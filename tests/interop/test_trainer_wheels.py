"""The code of the page about trainers, with classes of the published packages and stand-ins for engines and trainers.

The packages are fetched without their dependencies, so single classes are taken from their source. The tests fail if
another version of a package has other classes or parameters.
"""

from __future__ import annotations

import abc
import ast
import asyncio
import dataclasses
import enum
import functools
import importlib
import math
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner import Conversation, Environment, Player, Sampling, Task, TokenEngine, reward
from runner.testing import ScriptedEngine
from tests.interop.installing import HOME
from tests.repository import DOCS

pytestmark = pytest.mark.server("wheels")

WHEELS = HOME / "wheels"
PAGE = (DOCS / "trainers.md").read_text(encoding="utf-8")
TOP_K = Sampling(top_k=3)
TRAINING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
"""Sampling of a training episode, as verl's agent loop passes it."""


class Weather(Environment):
    """Environment with two turns. One task fails, and in another the engine returns no log-probability."""

    async def rollout(self, conversation: Conversation) -> None:
        turn = await conversation.generate()
        if "gap?" in str(self.task.prompt):
            turn.log.logprobs[turn.start] = math.nan
        if "fail?" in str(self.task.prompt):
            raise OSError("no disk")
        conversation.add("And now?")
        await conversation.generate()

    @reward
    def half(self) -> float:
        return 0.5


def engine() -> ScriptedEngine:
    return ScriptedEngine(["Sunny.", "Rainy."], sampling_masks=True, routed_experts=(2, 3))


def source(*parts: str) -> Path:
    """Return a file of a package, at any place in its wheel."""
    (path,) = [each for each in WHEELS.rglob(parts[-1]) if each.parts[-len(parts) :] == parts]
    return path


def taken(path: Path, *names: str, **needs: Any) -> types.SimpleNamespace:
    """Return classes, functions and constants of a module, without its imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    chosen = [each for each in tree.body if _name(each) in names]
    assert len(chosen) == len(names), f"{path.name} lacks some of {names}"
    space: dict[str, Any] = {**vars(typing), **needs, "__name__": f"taken_from_{path.stem}"}
    module = types.ModuleType(space["__name__"])
    module.__dict__.update(space)
    sys.modules[module.__name__] = module
    future = ast.parse("from __future__ import annotations").body
    exec(compile(ast.Module([*future, *chosen], []), str(path), "exec"), module.__dict__)
    return types.SimpleNamespace(**{name: module.__dict__[name] for name in names})


def _name(statement: ast.stmt) -> str:
    """Return the name that a statement of a module defines."""
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        return target.id if isinstance(target, ast.Name) else ""
    return str(getattr(statement, "name", ""))


def block(word: str) -> str:
    """Return the code block of the page that contains this word."""
    (found,) = [each for each in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if word in each]
    return str(found)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install stand-in modules during a test."""

    def make(**content: Any) -> None:
        for name, members in content.items():
            path = name.replace("__", ".")
            for depth in range(1, path.count(".") + 1):
                parent = ".".join(path.split(".")[:depth])
                if parent not in sys.modules:
                    monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
            module = types.ModuleType(path)
            module.__dict__.update(members if isinstance(members, dict) else vars(members))
            monkeypatch.setitem(sys.modules, path, module)

    make(weather={"Weather": Weather})
    return make


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    for name in [name for name in sys.modules if name.startswith(("taken_from_", "openenv."))]:
        del sys.modules[name]


def run_page(word: str, **names: Any) -> dict[str, Any]:
    exec(compile(block(word), f"trainers.md ({word})", "exec"), names)
    return names


async def closed(player: Any) -> None:
    await (await player if asyncio.isfuture(player) else player).aclose()


def test_verl_takes_what_the_page_returns(modules: Any) -> None:
    import pydantic
    import torch

    path = source("verl", "experimental", "agent_loop", "agent_loop.py")
    needs = {"BaseModel": pydantic.BaseModel, "ABC": abc.ABC, "abstractmethod": abc.abstractmethod, "torch": torch}
    own = taken(
        path, *("AgentLoopMetrics", "AgentLoopOutput", "AgentLoopBase", "register", "_agent_loop_registry"), **needs
    )
    own.AgentLoopOutput.model_rebuild()
    modules(verl__experimental__agent_loop__agent_loop=own)

    async def play() -> None:
        scripted = ScriptedEngine(["Sunny.", "Rainy."], routed_experts=(2, 3), record=True)
        page = run_page("EpisodeLoop", verl_engine=lambda manager, *, model, context: scripted)
        assert own._agent_loop_registry["deltarunner"]["_target_"].endswith("EpisodeLoop")
        loop = object.__new__(page["EpisodeLoop"])
        loop.loop, loop.server_manager = asyncio.get_running_loop(), None
        loop.tokenizer = types.SimpleNamespace(name_or_path="model")
        loop.rollout_config = types.SimpleNamespace(prompt_length=100, response_length=100)
        prompts = [[{"role": "user", "content": text}] for text in ("Oslo?", "gap?", "fail?")]
        played = await asyncio.gather(
            *(loop.run(TRAINING, index=number, raw_prompt=prompt) for number, prompt in enumerate(prompts))
        )
        for output, failed in zip(played, (False, True, True), strict=True):
            assert isinstance(output, own.AgentLoopOutput)
            fields = output.as_dict()
            assert len(fields["response_mask"]) == len(fields["responses"]) == len(fields["rollout_log_probs"])
            assert fields["routed_experts"].shape[0] == len(fields["prompts"]) + len(fields["responses"])
            assert (fields["response_mask"].sum() == 0) == failed
            assert fields["rollout_log_probs"].isfinite().all()
            assert output.reward_score == (0.0 if failed else 0.5)
        assert {(call.sampling.temperature, call.sampling.top_k) for call in scripted.calls} == {(0.7, 0)}
        begun = len(scripted.calls)
        validation = {"temperature": 0, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.0, "logprobs": False}
        # twice, as with val_kwargs.n
        repeated = [await loop.run(validation, index=0, raw_prompt=prompts[0]) for _ in range(2)]
        assert [output.reward_score for output in repeated] == [0.5, 0.5]
        used = scripted.calls[begun:]
        assert {(call.sampling.temperature, call.sampling.top_p, call.sampling.top_k) for call in used} == {(0, 0.9, 5)}
        assert len({call.seed for call in scripted.calls}) == len(scripted.calls)
        for name, prompt in (("response_length", prompts[0]), ("prompt_length", prompts[0])):
            loop.rollout_config = types.SimpleNamespace(prompt_length=100, response_length=100)
            setattr(loop.rollout_config, name, 5)
            output = await loop.run(TRAINING, index=9, raw_prompt=prompt)
            assert len(getattr(output, name.replace("length", "ids"))) == 5
            assert (output.extra_fields["outcome"], output.reward_score, sum(output.response_mask)) == (
                "too_long",
                0,
                0,
            )
        await closed(page["players"][loop.loop])

    asyncio.run(play())


def test_skyrl_takes_what_the_page_returns(modules: Any) -> None:
    path = source("skyrl", "train", "generators", "base.py")
    needs = {"ABC": abc.ABC, "abstractmethod": abc.abstractmethod}
    own = taken(path, "GeneratorInterface", "GeneratorOutput", "GeneratorInput", **needs)
    support = taken(source("utils", "sample_support.py"), "validate_sample_support", "SAMPLE_SUPPORT_PADDING", np=np)
    experts = taken(
        source("utils", "routed_experts.py"), "compact_routed_expert_indices", np=np, ROUTED_EXPERT_DTYPES=_DTYPES
    )
    modules(skyrl__train__generators__base=own)

    async def play() -> None:
        page = run_page("GeneratorInterface")
        async with Player(Weather, engine(), sampling=TOP_K) as player:
            tasks = {text: Task(id=text, prompt=text) for text in ("Oslo?", "gap?", "fail?")}
            generator = page["Episodes"](player, tasks)
            prompts = [[{"role": "user", "content": text}] for text in tasks]
            batch = {"prompts": prompts, "trajectory_ids": None, "sampling_params": {"temperature": 0.25}}
            output = await generator.generate(batch)
        assert output.keys() == own.GeneratorOutput.__annotations__.keys()
        assert batch.keys() <= own.GeneratorInput.__annotations__.keys()
        assert output["rewards"] == [0.5, 0.0, 0.0]
        assert [sum(mask) > 0 for mask in output["loss_masks"]] == [True, False, False]
        assert all(np.isfinite(row).all() for row in output["rollout_logprobs"])
        for ids, rows in zip(output["response_ids"], output["rollout_sample_support"], strict=True):
            assert support.validate_sample_support(rows).shape[0] == len(ids)
        for routed in output["rollout_expert_indices"]:
            assert experts.compact_routed_expert_indices(routed).shape[1:] == (2, 3)

    asyncio.run(play())


_DTYPES = frozenset({np.dtype(np.uint8), np.dtype(np.int16), np.dtype(np.int32)})


def test_openrlhf_takes_what_the_page_returns(modules: Any) -> None:
    from vllm import SamplingParams

    own = taken(
        source("openrlhf", "utils", "agent.py"), "AgentExecutorBase", ABC=abc.ABC, abstractmethod=abc.abstractmethod
    )
    modules(openrlhf__utils__agent=own)

    async def play() -> None:
        page = run_page("AgentExecutorBase")
        page["VllmEngine"] = types.SimpleNamespace(over=lambda llm: llm)
        executor = page["AgentExecutor"]()
        llm = types.SimpleNamespace(llm=ScriptedEngine(["Sunny.", "Rainy."], record=True))
        for prompt, failed in (("Oslo?", False), ("gap?", True), ("fail?", True), ("Rome?", True)):
            said = await executor.execute(
                prompt=prompt,
                label="x",
                sampling_params=SamplingParams(temperature=0.6, top_p=0.9, max_tokens=50),
                max_length=5 if prompt == "Rome?" else 4096,
                hf_tokenizer=None,
                llm_engine=llm,
                images=None,
            )
            assert said.keys() == final_response_keys(source("openrlhf", "utils", "agent.py"))
            assert len(said["observation_tokens"]) == len(said["rollout_log_probs"])
            assert np.isfinite(said["rollout_log_probs"]).all()
            text = [
                llm.llm.tokenizer.decode(said["observation_tokens"][slice(*span)]) for span in said["action_ranges"]
            ]
            assert [each.partition("<")[0] for each in text] == ([] if failed else ["Sunny.", "Rainy."])
            assert said["truncated"] == (prompt == "Rome?")
        used = {(call.sampling.temperature, call.sampling.top_p, call.sampling.max_tokens) for call in llm.llm.calls}
        assert used == {(0.6, 0.9, 50)}
        await closed(executor.started)

    asyncio.run(play())


def final_response_keys(path: Path) -> set[str]:
    """Return the keys of the dictionary that OpenRLHF's own executor returns."""
    assigned = [each for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(each, ast.Assign)]
    found = [each.value for each in assigned if getattr(each.targets[0], "id", "") == "final_response"]
    # a dict in the syntax tree
    return {key.value for key in found[0].keys if isinstance(key, ast.Constant)}  # type: ignore[misc, attr-defined]


def test_torchtitan_takes_what_the_page_returns(modules: Any) -> None:
    folder = source("experiments", "rl", "types.py").parent
    metric = types.SimpleNamespace(Metric=object)
    needs = {"dataclass": dataclasses.dataclass, "field": dataclasses.field, "m": metric, "StrEnum": enum.StrEnum}
    ids = taken(folder / "types.py", "RolloutTurnID", "Completion", **needs)
    rollouts = taken(
        folder / "rollout" / "types.py",
        *("RolloutStatus", "RolloutTurn", "Rollout", "RolloutGroup", "_TRUNCATED", "_ERROR"),
        **needs,
    )
    modules(
        torchtitan__experiments__rl__types=ids,
        torchtitan__experiments__rl__rollout__types=rollouts,
        torchtitan__experiments__rl__rollout__rollouter={"Rollouter": object},
    )
    wanted = parameters(folder / "rollout" / "rollouter.py", "run_group_rollouts")
    asked: list[str | None] = []

    async def generate_fn(
        prompt_token_ids: list[int],
        *,
        request_id: str,
        routing_session_id: str | None = None,
        sampling_config: Any = None,
    ) -> Any:
        asked.append(routing_session_id)
        said = [*scripted.tokenizer.encode("Yes."), *scripted.stop_ids]
        return ids.Completion(
            min_policy_version=3,
            max_policy_version=4,
            request_id=request_id,
            token_ids=said,
            token_logprobs=[-0.5] * len(said),
        )

    assert parameters(folder / "rollout" / "types.py", "__call__") == [
        *("prompt_token_ids", "request_id", "routing_session_id", "sampling_config")
    ]
    scripted = engine()

    async def play() -> None:
        page = run_page("titan_engine")
        page["TokenEngine"] = functools.partial(TokenEngine, template="pythonic")
        given = page["titan_engine"](generate_fn, model=scripted.tokenizer, context=4096)
        page["Episodes"].player = await Player(Weather, given, group_size=3).start()
        arguments = dict.fromkeys(wanted) | {"sample": {"id": 1, "prompt": "Oslo?"}, "group_id": 5}
        group = await page["Episodes"]().run_group_rollouts(**arguments)
        assert isinstance(group, rollouts.RolloutGroup)
        assert [each.reward for each in group.rollouts] == [0.5] * 3
        for rollout in group.rollouts:
            first, second = rollout.turns
            assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
            assert len(second.completion_token_ids) == len(second.completion_logprobs)
        arguments["sample"] = {"id": 2, "prompt": "fail?"}
        failed = await page["Episodes"]().run_group_rollouts(**arguments)
        assert {(each.status.is_error(), each.reward, len(each.turns)) for each in failed.rollouts} == {(True, None, 0)}
        await closed(page["Episodes"].player)

    asyncio.run(play())
    assert len(set(asked)) == 6


def parameters(path: Path, function: str) -> list[str]:
    """Return the parameters of a function of a module, without `self`."""
    defined = [
        each
        for each in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == function
    ]
    arguments = defined[0].args
    return [each.arg for each in (*arguments.args, *arguments.kwonlyargs) if each.arg != "self"]


def test_slime_sample_takes_what_the_page_sets(modules: Any) -> None:
    class Status(enum.Enum):
        COMPLETED = "completed"
        FAILED = "failed"

    fields = [
        *("tokens", "response_length", "loss_mask", "rollout_log_probs", "weight_versions", "reward"),
        *("remove_sample", "status", "rollout_routed_experts", "group_index", "prompt", "label"),
        *("rollout_top_p_token_ids", "rollout_top_p_token_offsets"),
    ]
    sample_class = type("Sample", (), {"__slots__": fields, "Status": Status})  # any other field is an error
    request = {"temperature": 0.7, "top_k": 3, "max_new_tokens": 40, "stop": None, "no_stop_trim": True}
    used: list[Sampling | None] = []

    class Noted(Weather):
        async def rollout(self, conversation: Conversation) -> None:
            try:
                await super().rollout(conversation)
            finally:
                used.extend(turn.sampling for turn in self.episode.turns)

    async def get(url: str) -> Any:
        assert url == "http://127.0.0.1:1/workers"
        return {"workers": [{"url": "http://127.0.0.1:2"}, {"url": "http://127.0.0.1:3"}]}

    modules(slime__utils__types={"Sample": sample_class}, slime__utils__http_utils={"get": get})

    async def play() -> None:
        page = run_page("slime.utils.types")
        engines = {f"http://127.0.0.1:{port}": engine() for port in (2, 3)}
        page["RemoteEngine"] = lambda url, model: engines.pop(url)
        page["Weather"] = Noted
        args = types.SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=1, hf_checkpoint="model")
        for number, (text, failed) in enumerate((("Oslo?", False), ("gap?", True), ("fail?", True))):
            sample: Any = sample_class()
            sample.group_index, sample.prompt, sample.label = number, text, "x"
            assert await page["generate"](args, sample, request) is sample
            assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
            assert np.isfinite(sample.rollout_log_probs).all()
            assert (sample.status, sample.remove_sample) == (Status.FAILED if failed else Status.COMPLETED, failed)
            assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
            offsets = sample.rollout_top_p_token_offsets
            assert len(offsets) == sample.response_length + 1
            assert offsets[-1] == len(sample.rollout_top_p_token_ids)
            assert bool(offsets[-1]) != failed
        players = await page["started"][0]
        assert not engines
        for player in players:
            await player.aclose()
        assert {(each.temperature, each.max_tokens) for each in used if each is not None} == {(0.7, 40)}

    asyncio.run(play())


def test_sglang_has_the_paths_and_fields_of_its_dialect() -> None:
    from runner.engines.remote import sglang

    server = source("srt", "entrypoints", "http_server.py").read_text(encoding="utf-8")
    dialect = sglang.SglangGenerate
    calls = {dialect.health.path, dialect.version.path, dialect.settings.path, dialect.paused.path, dialect.path}
    paths = calls | {"/pause_generation", "/continue_generation", "/flush_cache"}
    routes = set(re.findall(r"@app\.(?:get|post|api_route)\(\s*\"([^\"]+)\"", server))
    assert paths | {"/v1/models", "/tokenize"} <= routes
    request = source("srt", "managers", "io_struct.py").read_text(encoding="utf-8")
    for name in ("input_ids", "return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask"):
        assert re.search(rf"^    {name}: ", request, flags=re.MULTILINE), name
    answer = source("srt", "managers", "tokenizer_manager.py").read_text(encoding="utf-8")
    for name in ("output_token_sampling_mask", "output_token_sampling_logprobs", "weight_version", "routed_experts"):
        assert f'"{name}"' in answer
    spans = source("srt", "utils", "weight_versions.py").read_text(encoding="utf-8")
    assert all(f'"{name}"' in spans for name in ("weight_versions", "version", "start", "end"))
    parameters = source("srt", "sampling", "sampling_params.py").read_text(encoding="utf-8")
    for name in (*sglang._NAMES.values(), "top_k", "logit_bias", "sampling_seed", "stop_token_ids", "stream_interval"):
        assert re.search(rf"^    {name}: ", parameters, flags=re.MULTILINE), name


def test_tinker_has_the_parameters_of_the_page() -> None:
    path = source("public_interfaces", "sampling_client.py")
    assert parameters(path, "sample")[:3] == ["prompt", "num_samples", "sampling_params"]
    tree = ast.parse(source("_pydantic_types", "sampling_params.py").read_text(encoding="utf-8"))
    fields = {
        each.target.id
        for each in ast.walk(tree)
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    page = (DOCS / "engines.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"tinker\.SamplingParams\((.*?)\n        \)", page, flags=re.DOTALL)
    assert set(re.findall(r"(\w+)=", code)) <= fields
    assert "await client.sample(" in page
    assert "sample_async" not in page


def test_openenv_takes_the_session_of_an_episode(modules: Any) -> None:
    from runner.trainers.trl_async import EpisodeSessions

    folder = source("core", "harness", "training.py").parent
    # Packages whose own `__init__` module is left out, since it imports web servers.
    modules(
        openenv={"__path__": [str(folder.parents[1])]},
        openenv__core={"__path__": [str(folder.parent)]},
        openenv__core__harness={"__path__": [str(folder)]},
        openenv__core__harness__capture={"__path__": [str(folder / "capture")]},
    )
    traces = importlib.import_module("openenv.core.harness.training")
    (module,) = [each for each in folder.glob("*.py") if "class TrainableSession" in each.read_text(encoding="utf-8")]
    needs = {
        **{name: getattr(dataclasses, name) for name in ("dataclass", "field")},
        **{name: getattr(abc, name) for name in ("ABC", "abstractmethod")},
        **{name: getattr(typing, name) for name in ("Protocol", "runtime_checkable")},
    }
    own = taken(module, "VerifyResult", "TrainableSession", "ResourceSession", **needs)
    vars(sys.modules["openenv.core.harness"]).update(vars(own), TrainingTrace=traces.TrainingTrace)
    sessions = EpisodeSessions(
        Weather,
        engine,
        {text: Task(id=text, prompt=text) for text in ("Oslo?", "fail?")},
        sampling={"temperature": 0.5},
    )
    for text, reward_of in (("Oslo?", 0.5), ("fail?", None)):
        session: Any = sessions.create([{"role": "user", "content": text}], seed=1, episode_id="e")
        assert isinstance(session, own.TrainableSession)
        assert all(hasattr(session, name) for name in own.ResourceSession.__abstractmethods__)
        assert session.wait_for_completion() == 0
        trace = session.fetch_training_trace()
        assert len(trace.turns) == (2 if reward_of else 1)
        assert session.verify([]).env_reward == reward_of
        assert trace.turns[0].metadata["temperature"] == 0.5
        session.close()
    sessions.close()
