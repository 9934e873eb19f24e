"""LoRA adapters on vLLM: each samples like the model with the adapter's weights merged, beside the model without it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import numpy as np
import pytest

from runner import Conversation, Sampling, Task, Trajectory
from runner.engines.base import Finish, GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import call_all_workers
from runner.errors import BadOption, BadWeights, RequestRejected
from runner.testing import play_many
from runner.testing.engine_pool import PooledEngine
from tests.engines.changed_weights import changed_weights
from tests.engines.lora import adapter_config, adapter_tensors, save_adapter
from tests.playing import Plain

pytestmark = [pytest.mark.engine, pytest.mark.sample_functions(2)]

TOLERANCE_NATS = 1e-3  # in float32
PROMPT = list(range(1000, 1100))  # three blocks of the prefix cache, and a part of a fourth
TURN_TOKENS = 12

Result = TypeVar("Result")


@dataclass
class Teacher:
    """The small model in Hugging Face Transformers, in float32."""

    model: Any
    weights: Mapping[str, Any]

    def assert_says(
        self, said: Said, adapter: Mapping[str, Any] | None = None, base: Mapping[str, Any] | None = None
    ) -> None:
        """Assert that the model with the adapter merged has these log-probabilities and these greedy ids."""
        import torch

        merged = _merged(base or self.weights, adapter or {})
        ids = torch.tensor([[*PROMPT, *said.ids]])
        with torch.no_grad():
            logits = torch.func.functional_call(self.model, merged, (ids,)).logits[0, len(PROMPT) - 1 : -1]
        assert logits.argmax(-1).tolist() == said.ids
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(said.ids)[:, None])[:, 0].numpy()
        assert np.abs(logprobs - np.array(said.logprobs)).max() < TOLERANCE_NATS


def _merged(weights: Mapping[str, Any], adapter: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(weights)
    for name, a in adapter.items():
        if ".lora_A." in name:
            b = adapter[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            merged[f"{module}.weight"] = merged[f"{module}.weight"] + 2.0 * (b @ a)  # lora_alpha / r
    return merged


@pytest.fixture(scope="module")
def teacher(hugging_face_model: Any) -> Teacher:
    return Teacher(hugging_face_model, dict(hugging_face_model.named_parameters()))


@pytest.fixture(scope="module")
def adapters(teacher: Teacher) -> dict[str, dict[str, Any]]:
    """Tensors of three adapters, by name."""
    shapes = {name: tuple(weight.shape) for name, weight in teacher.weights.items()}
    ranks = {"poet": 4, "critic": 8, "judge": 1}
    return {
        name: adapter_tensors(shapes, seed=seed, rank=rank) for seed, (name, rank) in enumerate(ranks.items(), start=1)
    }


@pytest.fixture
def folders(adapters: dict[str, dict[str, Any]], tmp_path: Path) -> dict[str, Path]:
    ranks = {"poet": 4, "critic": 8, "judge": 1}
    return {
        name: save_adapter(tmp_path / name, tensors, adapter_config(ranks[name])) for name, tensors in adapters.items()
    }


@pytest.fixture
def home(float32_engine: PooledEngine) -> Iterator[PooledEngine]:
    """An engine that accepts two adapters at once, before any is added."""
    home = float32_engine
    yield home
    for name in list(home.adapters):
        at(home, home.remove_adapter, name)
    assert home.inner.stats().open == 0
    assert not folders_kept(home)


def at(home: PooledEngine, function: Callable[..., Awaitable[Result]], *args: Any, **options: Any) -> Result:
    """Call a function of the engine on the engine's event loop."""
    return home.home.call(partial(function, *args, **options))


def folders_kept(home: PooledEngine) -> list[Path]:
    return [folder for folder in cast("VllmEngine", home.inner).vllm.adapters._folders if folder.exists()]


def loaded(home: PooledEngine) -> set[int]:
    """Ids of the adapters that vLLM has loaded."""
    return set(at(home, cast("VllmEngine", home.inner).vllm.llm.list_loras))


@dataclass
class Said:
    ids: list[int]
    logprobs: list[float]
    finish: Finish

    @property
    def versions(self) -> list[str]:
        return [span.version for span in self.finish.versions]


def turn(adapter: str | None, length: int = TURN_TOKENS) -> GenerationRequest:
    sampling = Sampling(adapter=adapter, temperature=0, max_tokens=length).over(Sampling.defaults())
    return GenerationRequest(name=f"with {adapter}", prompt=PROMPT, sampling=sampling, acts_on_deltas=True)


async def say(
    engine: PooledEngine, adapter: str | None = None, between: Callable[[], Awaitable[Any]] | None = None
) -> Said:
    """Return the text of one turn; `between` is called once, after it began."""
    ids: list[int] = []
    logprobs: list[float] = []
    async with engine.stream(turn(adapter)) as deltas:
        async for delta in deltas:
            ids += delta.token_ids
            logprobs += delta.logprobs or ()
            if between is not None:
                await between()
                between = None
    assert deltas.finish is not None
    return Said(ids, logprobs, deltas.finish)


async def say_at_once(engine: PooledEngine, adapters: Sequence[str | None]) -> list[Said]:
    said: dict[int, Said] = {}

    async def keep(place: int, adapter: str | None) -> None:
        said[place] = await say(engine, adapter)

    async with anyio.create_task_group() as tasks:
        for place, adapter in enumerate(adapters):
            tasks.start_soon(keep, place, adapter)
    return [said[place] for place in range(len(adapters))]


def test_concurrent_adapters_equal_merged_models(
    home: PooledEngine, teacher: Teacher, adapters: dict[str, Any], folders: dict[str, Path]
) -> None:
    before = at(home, say, home)
    teacher.assert_says(before)
    for name in ("poet", "critic"):
        at(home, home.add_adapter, name, folders[name])
    assert dict(home.adapters) == {name: folders[name] for name in ("poet", "critic")}
    base, poet, critic, again = at(home, say_at_once, home, [None, "poet", "critic", None])
    teacher.assert_says(base)
    teacher.assert_says(poet, adapters["poet"])
    teacher.assert_says(critic, adapters["critic"])
    alone = at(home, say, home)
    teacher.assert_says(alone)
    assert before.ids == base.ids == again.ids == alone.ids
    assert len({tuple(said.ids) for said in (base, poet, critic)}) == 3


def test_new_version_of_a_name_never_uses_old_caches(
    home: PooledEngine, teacher: Teacher, adapters: dict[str, Any], folders: dict[str, Path]
) -> None:
    label = at(home, home.add_adapter, "poet", folders["poet"])
    first, cached = (at(home, say, home, "poet") for _ in range(2))
    assert (first.finish.cached_tokens, cached.finish.cached_tokens) == (0, 96)
    shutil.rmtree(folders["poet"])
    # as a trainer that overwrites its latest adapter
    save_adapter(folders["poet"], adapters["critic"], adapter_config(8))

    async def add_again() -> None:
        await home.add_adapter("poet", folders["poet"])

    in_flight = at(home, say, home, "poet", add_again)
    new, new_cached = (at(home, say, home, "poet") for _ in range(2))
    for said in (first, cached, in_flight):
        teacher.assert_says(said, adapters["poet"])
    for said in (new, new_cached):
        teacher.assert_says(said, adapters["critic"])
    assert (new.finish.cached_tokens, new_cached.finish.cached_tokens) == (0, 96)
    name, _, number = label.partition("@")
    newer = f"{name}@{int(number) + 1}"
    (base,) = at(home, say, home).versions
    assert first.versions == cached.versions == in_flight.versions == [f"{base}+{label}"]
    assert new.versions == [f"{base}+{newer}"]
    assert home.runtime is not None
    assert [home.lag(f"{base}+{each}") for each in (label, newer)] == [1, 0]


@pytest.mark.whole
def test_evicted_adapters_are_read_again_from_copies(
    home: PooledEngine, teacher: Teacher, adapters: dict[str, Any], folders: dict[str, Path]
) -> None:
    for name, folder in folders.items():
        at(home, home.add_adapter, name, folder)
        shutil.rmtree(folder)
    assert len(loaded(home)) == 2
    for _ in range(2):
        for name, said in zip(folders, at(home, say_at_once, home, list(folders)), strict=True):
            teacher.assert_says(said, adapters[name])


def test_tensors_are_taken_as_well_as_a_folder(home: PooledEngine, teacher: Teacher, adapters: dict[str, Any]) -> None:
    at(home, home.add_adapter, "poet", adapters["poet"], config=adapter_config(4))
    teacher.assert_says(at(home, say, home, "poet"), adapters["poet"])


def test_removed_adapter_finishes_turns_and_is_unloaded_later(
    home: PooledEngine, teacher: Teacher, adapters: dict[str, Any], folders: dict[str, Path]
) -> None:
    at(home, home.add_adapter, "poet", folders["poet"])
    held = loaded(home)
    said = at(home, say, home, "poet", partial(home.remove_adapter, "poet"))
    teacher.assert_says(said, adapters["poet"])
    assert loaded(home) == held
    with pytest.raises(RequestRejected, match="no adapter 'poet'; it has none"):
        at(home, say, home, "poet")
    at(home, home.add_adapter, "critic", folders["critic"])
    assert not held & loaded(home)
    assert len(folders_kept(home)) == 1
    teacher.assert_says(at(home, say, home, "critic"), adapters["critic"])


def test_misfit_adapter_changes_nothing(
    home: PooledEngine, teacher: Teacher, adapters: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    at(home, home.add_adapter, "poet", folders["poet"])
    wrong = dict(adapters["poet"])
    name = next(iter(wrong))
    wrong[name] = wrong[name][:, :-1].contiguous()
    with pytest.raises(BadWeights, match=f"'poet'.*{name}.*shape"):
        at(home, home.add_adapter, "poet", save_adapter(tmp_path / "wrong", wrong))
    with pytest.raises(BadWeights, match=r"rank 16 .*max_lora_rank=8"):
        at(home, home.add_adapter, "poet", save_adapter(tmp_path / "wide", wrong, adapter_config(16)))
    assert len(folders_kept(home)) == 1
    teacher.assert_says(at(home, say, home, "poet"), adapters["poet"])


def test_adapter_on_a_layer_that_vllm_ignores_is_refused(
    home: PooledEngine, teacher: Teacher, adapters: dict[str, Any], folders: dict[str, Path]
) -> None:
    at(home, home.add_adapter, "poet", folders["poet"])
    at(home, home.remove_adapter, "poet")
    llm = cast("VllmEngine", home.inner).vllm.llm
    ignored = "model.layers.0.mlp.down_proj"
    at(home, call_all_workers, llm, "apply_no_adapter_to", module=ignored)
    try:
        with pytest.raises(BadWeights, match=rf"'poet'.* applies no adapter to {ignored}, .*exclude_modules"):
            at(home, home.add_adapter, "poet", folders["poet"])
        assert not folders_kept(home)
        assert not loaded(home)
    finally:
        at(home, call_all_workers, llm, "apply_adapters_again")
    at(home, home.add_adapter, "poet", folders["poet"])
    teacher.assert_says(at(home, say, home, "poet"), adapters["poet"])


def test_the_weights_under_an_adapter_can_change(
    home: PooledEngine,
    teacher: Teacher,
    adapters: dict[str, Any],
    folders: dict[str, Path],
    small_model_folder: Path,
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    at(home, home.add_adapter, "poet", folders["poet"])
    before = at(home, say, home, "poet")
    changed = changed_weights(tmp_path, small_model_folder, factor=1.5)
    tensors = {name: tensor.float() for name, tensor in load_file(changed / "model.safetensors").items()}
    try:
        at(home, home.update_weights, changed, version="changed")
        for said in [at(home, say, home, "poet") for _ in range(2)]:
            teacher.assert_says(said, adapters["poet"], base=tensors)
            assert said.ids != before.ids
            assert said.versions[0].startswith("changed+poet@")
        teacher.assert_says(at(home, say, home), base=tensors)
    finally:
        at(home, home.update_weights, small_model_folder, version="first again")
    teacher.assert_says(at(home, say, home, "poet"), adapters["poet"])


class Debate(Plain):
    """Environment with three turns: one of the model, and one of each of two adapters."""

    def tasks(self) -> list[Task]:
        return [Task(id=str(number), prompt=f"Say something about the number {number}.") for number in range(4)]

    async def rollout(self, conversation: Conversation) -> None:
        for adapter in (None, "poet", "critic"):
            await conversation.generate(sampling=Sampling(adapter=adapter, max_tokens=8))
            conversation.add("Continue.")


def test_the_turns_of_one_run_are_of_the_adapters_that_they_ask_for(
    home: PooledEngine, folders: dict[str, Path]
) -> None:
    labels = [at(home, home.add_adapter, name, folders[name]) for name in ("poet", "critic")]
    for trajectory in play_many(Debate, home):
        assert trajectory.outcome.scored, trajectory.error
        suffixes = [span.version.partition("+")[2] for span in spans(trajectory)]
        assert suffixes == ["", *labels]
        asked = [each.sampling.adapter if each.sampling else "" for each in trajectory.turns]
        assert asked == [None, "poet", "critic"]


def spans(trajectory: Trajectory) -> list[Any]:
    return [span for segment in trajectory.segments for span in segment.log.versions]


@pytest.mark.whole
@pytest.mark.anyio
async def test_engine_without_adapters_names_the_argument(engine: VllmEngine, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter_config()))
    with pytest.raises(BadOption, match=r"VllmEngine\(enable_lora=True, max_lora_rank=16\)"):
        await engine.add_adapter("poet", tmp_path)
