"""LoRA adapters without a model: refusals before vLLM gets an adapter, and the removal of earlier ones."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.adapters import Adapters, base_and_adapter
from runner.engines.vllm.adapters import VllmAdapters
from runner.engines.vllm.worker.cpu_patches import masks, patch_lora_kernels
from runner.engines.vllm.worker.extension import WeightWorker
from runner.errors import BadOption, BadWeights, EngineDead, EngineError, RequestRejected
from runner.models import ResolvedModel
from tests.engines.lora import adapter_config, adapter_tensors, save_adapter

pytestmark = pytest.mark.anyio

LAYER = "model.layers.0"
STEM = f"base_model.model.{LAYER}.self_attn.q_proj"
SHAPES = {
    "model.embed_tokens.weight": (50, 16),
    "model.norm.weight": (16,),
    f"{LAYER}.self_attn.q_proj.weight": (16, 16),
    f"{LAYER}.self_attn.v_proj.weight": (8, 16),
    f"{LAYER}.mlp.gate_proj.weight": (32, 16),
    f"{LAYER}.mlp.down_proj.weight": (16, 32),
}


class FakeVllm:
    """Stand-in for vLLM; `fails` is raised when an adapter is added."""

    masks = True

    def __init__(self, model: Path, *, enabled: bool = True, quantization: str | None = None) -> None:
        whole = SimpleNamespace()
        whole.get_text_config = lambda: whole
        self.masked: list[bool] = []
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cpu"),
            lora_config=SimpleNamespace(max_lora_rank=8) if enabled else None,
            model_config=SimpleNamespace(quantization=quantization, hf_config=whole),
            parallel_config=SimpleNamespace(worker_extension_cls=""),
        )
        self.model = ResolvedModel("tiny", str(model), model)
        self.loaded: dict[int, Path] = {}
        self.fails: Exception | None = None
        self.called: Callable[[], object] = lambda: None

    async def add_lora(self, request: Any) -> bool:
        self.called()
        await checkpoint()
        if self.fails is not None:
            raise self.fails
        self.loaded[request.lora_int_id] = Path(request.lora_path)
        return True

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> list[bool]:
        assert (method, kwargs) == ("patch_adapters", {})
        assert not self.loaded
        if isinstance(self.fails, Exception):
            raise self.fails
        self.masked.append(self.masks)
        return [True, self.masks]

    async def remove_lora(self, key: int) -> bool:
        del self.loaded[key]
        return True


async def answered(what: str, call: Awaitable[Any]) -> Any:
    return await call


def adapters_of(vllm: FakeVllm) -> VllmAdapters:
    return VllmAdapters(vllm, vllm.model, answered)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture
def vllm(model: Path) -> FakeVllm:
    return FakeVllm(model)


@pytest.fixture
def book(vllm: FakeVllm) -> VllmAdapters:
    return adapters_of(vllm)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "poet", adapter_tensors(SHAPES, seed=1))


# --- refusals before vLLM gets an adapter


def configured(**settings: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({**adapter_config(), **settings}))

    return spoil


def written(text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(text)

    return spoil


def without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def with_tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = adapter_tensors(SHAPES, seed=1)
        change(tensors)
        save_adapter(folder, tensors)

    return spoil


def renamed(old: str, new: str) -> Callable[[Path], None]:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return with_tensors(change)


def reshaped(name: str, *shape: int) -> Callable[[Path], None]:
    import torch

    return with_tensors(lambda tensors: tensors.update({name: torch.zeros(shape)}))


def as_integers(tensors: dict[str, Any]) -> None:
    tensors[f"{STEM}.lora_A.weight"] = tensors[f"{STEM}.lora_A.weight"].int()


def diverged(tensors: dict[str, Any]) -> None:
    tensors[f"{STEM}.lora_B.weight"][0, 0] = float("nan")


def with_magnitude(tensors: dict[str, Any]) -> None:
    tensors[f"{STEM}.lora_magnitude_vector"] = tensors[f"{STEM}.lora_B.weight"][:, 0].clone()


def with_norm(tensors: dict[str, Any]) -> None:
    for part in "AB":
        tensors[f"base_model.model.model.norm.lora_{part}.weight"] = tensors[f"{STEM}.lora_{part}.weight"].clone()


BAD = {
    "no configuration": (without("adapter_config.json"), ["adapter_config.json is missing", "save_pretrained"]),
    "no tensors": (without("adapter_model.safetensors"), ["adapter_model.safetensors is missing"]),
    "no JSON": (written("{"), ["adapter_config.json is not JSON"]),
    "no settings": (written("[]"), ["adapter_config.json holds list"]),
    "another method": (configured(peft_type="IA3"), ["peft_type 'IA3'", "LORA"]),
    "no rank": (written('{"lora_alpha": 8, "target_modules": []}'), ["adapter_config.json", "'r'"]),
    "rank of text": (configured(r="4"), ["adapter_config.json"]),
    "rank too high": (configured(r=16), ["rank 16", "max_lora_rank=8", "VllmEngine(enable_lora=True"]),
    "rank of one module too high": (configured(rank_pattern={"q_proj": 9}), ["rank 9", "max_lora_rank=8"]),
    "DoRA": (configured(use_dora=True), ["DoRA"]),
    "bias": (configured(bias="all"), ["bias"]),
    "further modules": (configured(modules_to_save=["lm_head"]), ["modules_to_save"]),
    "truncated": (truncated, ["adapter_model.safetensors is truncated", "lora_"]),
    "empty": (with_tensors(dict.clear), ["holds no tensor"]),
    "unknown module": (renamed("q_proj", "query"), [f"no module '{LAYER}.self_attn.query'"]),
    "a part of the model": (renamed(".model.model.", ".model."), ["'model.layers.0.", "train the whole model"]),
    "another layer": (renamed("layers.0.", "layers.7."), ["no module 'model.layers.7."]),
    "the adapter's name in names": (
        renamed("lora_A.weight", "lora_A.default.weight"),
        ["lora_A.default.weight", "get_peft_model_state_dict"],
    ),
    "DoRA in tensors": (with_tensors(with_magnitude), ["lora_magnitude_vector", "DoRA"]),
    "a norm": (with_tensors(with_norm), ["model.norm.weight", "(16,)"]),
    "no B": (
        with_tensors(lambda tensors: tensors.pop(f"{STEM}.lora_B.weight")),
        [f"{STEM}.lora_A", "no matching lora_B"],
    ),
    "no A": (
        with_tensors(lambda tensors: tensors.pop(f"{STEM}.lora_A.weight")),
        [f"{STEM}.lora_B", "no matching lora_A"],
    ),
    "A too narrow": (reshaped(f"{STEM}.lora_A.weight", 4, 15), [f"{STEM}.lora_A", "(4, 15)", "(4, 16)"]),
    "B too short": (reshaped(f"{STEM}.lora_B.weight", 15, 4), [f"{STEM}.lora_B", "(15, 4)", "(16, 4)"]),
    "another rank": (configured(r=8), ["(4, ", "rank 8"]),
    "integers": (with_tensors(as_integers), [f"{STEM}.lora_A", "int32"]),
    "diverged": (with_tensors(diverged), [f"{STEM}.lora_B", "NaN"]),
    "a target without tensors": (
        with_tensors(lambda tensors: [tensors.pop(name) for name in list(tensors) if "v_proj" in name]),
        ["target module 'v_proj'"],
    ),
    "no folder": (shutil.rmtree, ["the folder does not exist"]),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
async def test_misfit_is_refused_before_vllm_and_changes_nothing(
    book: VllmAdapters, vllm: FakeVllm, folder: Path, spoil: Callable[[Path], None], words: list[str]
) -> None:
    assert await book.add("poet", folder) == "poet@1"
    before = dict(vllm.loaded)
    spoil(folder)
    with pytest.raises(BadWeights) as refused:
        await book.add("poet", folder)
    for piece in [*words, "'poet'", str(folder)]:
        assert piece in str(refused.value)
    assert "deltarunner-adapter-" not in str(refused.value)
    assert vllm.loaded == before
    assert kept(book) == set(before.values())
    version = book.take("turn", "poet")
    assert version is not None
    assert version.label == "poet@1"


def kept(book: VllmAdapters) -> set[Path]:
    """Return the copies on disk or in memory."""
    assert all(folder.is_dir() for folder in book._folders)
    return set(book._folders)


async def test_adapter_file_is_refused_in_favor_of_its_folder(book: VllmAdapters, folder: Path) -> None:
    with pytest.raises(BadWeights, match="give the folder that holds it"):
        await book.add("poet", folder / "adapter_model.safetensors")


@pytest.mark.parametrize("source", [None, 7], ids=str)
async def test_adapter_source_of_a_wrong_type_is_refused_by_its_type(book: VllmAdapters, source: Any) -> None:
    with pytest.raises(BadWeights, match=f"not {type(source).__name__}"):
        await book.add("poet", source)


@pytest.mark.parametrize("name", ["", "a+b", "a@2", "../x", "a b", "x" * 101, None], ids=repr)
async def test_a_name_that_could_be_misread_in_a_weight_version_is_refused(book: VllmAdapters, name: Any) -> None:
    with pytest.raises(BadOption, match="give a name of up to 100 letters"):
        await book.add(name, "anywhere")


async def test_engine_without_adapters_names_the_option_for_them(model: Path, folder: Path) -> None:
    book = adapters_of(FakeVllm(model, enabled=False))
    with pytest.raises(BadOption, match=r"VllmEngine\(enable_lora=True, max_lora_rank="):
        await book.add("poet", folder)


async def test_shapes_of_a_quantized_model_are_left_to_vllm(model: Path, folder: Path) -> None:
    reshaped(f"{STEM}.lora_A.weight", 4, 15)(folder)
    assert await adapters_of(FakeVllm(model, quantization="awq")).add("poet", folder) == "poet@1"


async def test_adapter_that_vllm_refuses_leaves_no_files(book: VllmAdapters, vllm: FakeVllm, folder: Path) -> None:
    await book.add("poet", folder)
    await book.remove("poet")
    vllm.fails = EngineError("add_adapter(): unexpected modules")
    with pytest.raises(BadWeights, match=r"'poet'.*refuses it.*unexpected modules"):
        await book.add("poet", folder)
    assert not kept(book)
    assert not book.folders
    vllm.fails = EngineDead("The engine died")
    with pytest.raises(EngineDead):
        await book.add("poet", folder)
    assert not kept(book)
    assert not book.folders


async def test_kernels_are_patched_once_before_the_first_adapter_on_cpu(
    book: VllmAdapters, vllm: FakeVllm, folder: Path
) -> None:
    for name in ("poet", "critic"):
        await book.add(name, folder)
    assert vllm.masked == [True]


async def test_engine_whose_kernels_cannot_be_patched_takes_no_adapter(
    book: VllmAdapters, vllm: FakeVllm, folder: Path
) -> None:
    vllm.fails = EngineError("no attribute 'patch_adapters'")
    with pytest.raises(BadOption, match=r"inherit from runner\.engines\.vllm\.worker\.extension\.WeightWorker"):
        await book.add("poet", folder)
    vllm.fails, vllm.masks = None, False
    with pytest.raises(BadOption, match="applies adapters to turns without an adapter"):
        await book.add("poet", folder)
    assert not vllm.loaded
    assert not kept(book)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels of vLLM for CPUs, as they are used; unpatched again after the test."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for module in (lora_ops, punica_cpu):
        for name in ("bgmv_shrink", "bgmv_expand", "bgmv_expand_slice"):
            monkeypatch.setattr(module, name, getattr(module, name))
    return punica_cpu


def test_unpatched_kernels_apply_an_adapter_to_every_turn(kernels: Any) -> None:
    assert not masks(kernels), "vLLM has fixed it: remove the patch"


def test_kernels_for_cpus_leave_turns_without_an_adapter_alone(kernels: Any) -> None:
    import torch

    assert patch_lora_kernels()
    assert patch_lora_kernels()
    inputs, slots = torch.rand(4, 3), torch.rand(2, 1, 2, 3)
    indices = torch.tensor([1, -1, 0, -1])
    shrunk, expanded = torch.zeros(4, 2), torch.ones(4, 5)
    kernels.bgmv_shrink(inputs, slots, shrunk, indices, 0.5)
    kernels.bgmv_expand_slice(shrunk, slots.transpose(2, 3), expanded, indices, 1, 3, True)
    for row, slot in enumerate(indices.tolist()):
        wanted = torch.zeros(2) if slot < 0 else 0.5 * slots[slot, 0] @ inputs[row]
        assert torch.allclose(shrunk[row], wanted)
        added = torch.zeros(3) if slot < 0 else slots[slot, 0].T @ wanted
        assert torch.allclose(expanded[row], torch.nn.functional.pad(added, (1, 1)) + 1)
    expanded = torch.zeros(4, 2)
    kernels.sgmv_expand(
        inputs, slots, expanded, torch.tensor([0, 3]), torch.tensor([3, 1]), torch.tensor([-1, 1]), 2, 3, 4, True
    )
    assert not expanded[:3].any()
    assert torch.allclose(expanded[3], slots[1, 0] @ inputs[3])


# --- tensors instead of a folder


async def test_tensors_are_taken_with_their_configuration(book: VllmAdapters, vllm: FakeVllm) -> None:
    tensors = adapter_tensors(SHAPES, seed=1)
    config = {**adapter_config(), "target_modules": {"q_proj", "v_proj", "gate_proj", "down_proj"}}
    assert await book.add("poet", tensors, config=config) == "poet@1"
    assert dict(book.folders) == {"poet": None}
    (copy,) = vllm.loaded.values()
    assert json.loads((copy / "adapter_config.json").read_text())["target_modules"] == sorted(config["target_modules"])


async def test_tensors_without_and_folder_with_config_are_refused(book: VllmAdapters, folder: Path) -> None:
    with pytest.raises(BadOption, match=r"config=.*lora_alpha"):
        await book.add("poet", adapter_tensors(SHAPES, seed=1))
    with pytest.raises(BadOption, match="is for tensors, and a folder has"):
        await book.add("poet", folder, config=adapter_config())
    with pytest.raises(BadWeights, match="'a' is list: give a tensor"):
        await book.add("poet", {"a": [1.0]}, config=adapter_config())
    assert not kept(book)


# --- versions


async def test_every_version_has_its_own_id_name_and_private_folder(
    book: VllmAdapters, vllm: FakeVllm, folder: Path
) -> None:
    requests = []
    for number in (1, 2):
        assert await book.add("poet", folder) == f"poet@{number}"
        version = book.take("turn", "poet")
        requests.append(book.request(version))
        assert (Path(requests[-1].lora_path) / "adapter_model.safetensors").read_bytes()
    await book.remove("poet")
    assert await book.add("poet", folder) == "poet@3"
    requests.append(book.request(book.take("turn", "poet")))
    for of in ("lora_int_id", "lora_name", "lora_path"):
        assert len({getattr(request, of) for request in requests}) == 3
    assert folder not in vllm.loaded.values()


async def test_version_is_unloaded_after_its_last_turn_and_next_change(
    book: VllmAdapters, vllm: FakeVllm, folder: Path
) -> None:
    await book.add("poet", folder)
    first, again = book.take("turn 1", "poet"), book.take("turn 2", "poet")
    await book.add("poet", folder)
    book.leave(first)
    await book.add("critic", folder)
    assert set(vllm.loaded) == {1, 2, 3}
    book.leave(again)
    await book.remove("critic")
    assert set(vllm.loaded) == {2}
    assert kept(book) == set(vllm.loaded.values())
    await book.remove("poet")
    assert not vllm.loaded
    assert not kept(book)


async def test_closing_deletes_every_copy(book: VllmAdapters, folder: Path) -> None:
    await book.add("poet", folder)
    (copy,) = kept(book)
    book.close()
    assert not copy.exists()
    assert not kept(book)


async def test_unclosed_adapters_delete_their_copies_when_dropped(model: Path, folder: Path) -> None:
    book = adapters_of(FakeVllm(model))
    await book.add("poet", folder)
    (copy,) = kept(book)
    await anyio.to_thread.run_sync(int)  # the thread that loaded it may refer to it until it has another job
    del book
    gc.collect()
    assert not copy.exists()


@pytest.mark.parametrize("early", [True, False], ids=["before", "while vLLM loads it"])
async def test_a_cancelled_addition_is_done_or_leaves_nothing(
    book: VllmAdapters, vllm: FakeVllm, folder: Path, early: bool
) -> None:
    with anyio.CancelScope() as scope:
        vllm.called = scope.cancel
        if early:
            scope.cancel()
        await book.add("poet", folder)
    assert set(book.folders) == (set() if early else {"poet"})
    assert kept(book) == set(vllm.loaded.values())


def test_unknown_adapter_is_refused_with_the_existing_ones() -> None:
    with pytest.raises(RequestRejected, match=r"episode/main/1: the engine has no adapter 'poet'; it has none"):
        Adapters().take("episode/main/1", "poet")
    with pytest.raises(RequestRejected, match=r"no adapter 'poet'; it has 'critic', 'judge'"):
        Adapters(["critic", "judge"]).check("episode/main/1", "poet")


async def test_removal_of_an_unknown_adapter_names_the_existing_ones() -> None:
    with pytest.raises(BadOption, match=r"'poet'\): .* no adapter of that name; it has none, so there is nothing to"):
        await Adapters().remove("poet")
    with pytest.raises(BadOption, match=r"'poet'\): .* no adapter of that name; it has 'critic', 'judge'\."):
        await Adapters(["critic", "judge"]).remove("poet")


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("7", ("7", "", 0)),
        ("7+poet@2", ("7", "poet", 2)),
        ("step+1", ("step+1", "", 0)),
        ("step+1+poet-v1.5@12", ("step+1", "poet-v1.5", 12)),
        ("", ("", "", 0)),
    ],
)
def test_a_weight_version_is_read_in_its_parts(version: str, parts: tuple[str, str, int]) -> None:
    assert base_and_adapter(version) == parts


def test_parts_of_fused_experts_count_as_applied() -> None:
    loras = {name: object() for name in ("mlp.experts", "mlp.experts.base_layer", "mlp.shared_expert_gate")}
    adapters = SimpleNamespace(
        modules=["mlp.experts", "mlp.shared_expert"],
        get_adapter=lambda key: SimpleNamespace(loras=loras),
        _get_lora_layer_weights=lambda adapter, module: adapter.loras.get(module),
    )
    worker = WeightWorker()
    worker.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=adapters))
    assert worker.unused_adapter_modules(1) == ["mlp.shared_expert_gate"]
