"""`check_weights`: the tensors of a model that arrive in an engine that gets new ones."""

from __future__ import annotations

import copy
import io
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from runner import BadModel, BadOption, BadWeights, ProofFigures, ProofTolerance, WeightProof
from runner.cli import app
from runner.cli.check_weights import WRONG_WEIGHTS_CODE, show
from runner.engines.proof_history import ProofHistory
from runner.engines.proofs import Accepted, ScoredPass
from runner.engines.runtime import EngineRuntime
from runner.testing import ScriptedEngine
from runner.training import CheckedTensor, TensorVerdict, Way, WeightReport, check_weights, weight_check, weight_proof
from runner.training.check_inputs import adapter_on, check_memory, linear_kinds, local_transfer
from runner.training.tiny_model import float_tensors, random_model, tensor_kind, tiny_config
from runner.training.weight_check import _Trial
from tests.engines.stale_worker import STALE

torch: Any = pytest.importorskip("torch", reason="torch is not installed")
transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES: dict[str, Any] = {"num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 1000}
GROUPED = {**SIZES, "num_key_value_heads": 8, "intermediate_size": 14336}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", GROUPED),
    "Qwen2": ("Qwen2Config", GROUPED),
    "Qwen3-MoE": ("Qwen3MoeConfig", {**GROUPED, "num_experts": 128, "head_dim": 128}),
    "Qwen3-Next": ("Qwen3NextConfig", {**GROUPED, "num_experts": 64, "head_dim": 256}),
    "Mixtral": ("MixtralConfig", GROUPED),
    "Gemma 3": ("Gemma3TextConfig", {**GROUPED, "head_dim": 256}),
    "Phi-3": ("Phi3Config", {**GROUPED, "pad_token_id": 0}),
    "GPT-NeoX": ("GPTNeoXConfig", {**SIZES, "intermediate_size": 8192}),
    "gpt-oss": ("GptOssConfig", {**GROUPED, "num_local_experts": 128, "head_dim": 64}),
    "OLMo 2": ("Olmo2Config", GROUPED),
    "Granite": ("GraniteConfig", GROUPED),
    "Cohere": ("CohereConfig", GROUPED),
    "AfMoE": ("AfmoeConfig", {**GROUPED, "num_experts": 64, "head_dim": 128, "num_dense_layers": 2}),
    "OPT": ("OPTConfig", {**SIZES, "ffn_dim": 16384, "word_embed_proj_dim": 2048}),
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A folder with only the configuration of a large Llama."""
    transformers.LlamaConfig(**GROUPED, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_model_has_every_kind_of_tensor_and_few_values(name: str) -> None:
    kind, fields = CONFIGS[name]
    config = getattr(transformers, kind)(**fields)
    tiny = tiny_config(config)
    assert config.num_hidden_layers == 40, "the given configuration is not changed"
    assert set(getattr(tiny, "layer_types", None) or ()) == set(getattr(config, "layer_types", None) or ())
    model = random_model(tiny)
    assert sum(parameter.numel() for parameter in model.parameters()) < 20e6
    assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 1000)


def test_tiny_model_has_the_experts_after_dense_layers() -> None:
    """AfMoE begins with dense layers, so a model of two layers would have no experts."""
    _, fields = CONFIGS["AfMoE"]
    tiny = tiny_config(transformers.AfmoeConfig(**fields))
    assert (tiny.num_hidden_layers, len(tiny.layer_types)) == (3, 3)
    names = {tensor_kind(name) for name, _ in random_model(tiny).named_parameters()}
    assert {"model.layers.*.mlp.router.gate.weight", "model.layers.*.mlp.experts.gate_up_proj"} <= names


def test_tiny_model_has_no_tensor_of_zeros() -> None:
    """A bias of zeros would hide that an engine ignores it: Ernie 4.5 has one with two axes, GLM 4 MoE has a buffer."""
    ernie = transformers.Ernie4_5_MoeConfig(num_hidden_layers=4, moe_layer_start_index=1, moe_layer_end_index=3)
    for config in (ernie, transformers.Glm4MoeConfig(**GROUPED, head_dim=128)):
        for name, tensor in random_model(tiny_config(config, vocabulary=100)).state_dict().items():
            assert tensor.abs().max() > 0, name


def test_persistent_buffers_are_tensors_to_check() -> None:
    model = random_model(tiny_config(transformers.Glm4MoeConfig(**GROUPED, head_dim=128), vocabulary=100))
    tensors = float_tensors(model)
    (buffer,) = {tensor_kind(name) for name in tensors} - {tensor_kind(name) for name, _ in model.named_parameters()}
    assert buffer == "model.layers.*.mlp.gate.e_score_correction_bias"
    assert not {name for name in tensors if "inv_freq" in name}, "the model computes these buffers"
    trial = _Trial(Path(), model, Path(), {})
    assert buffer in trial.kinds_of(Way.STATE_DICT)
    first = {name: tensor.clone() for name, tensor in tensors.items()}
    trial._change(buffer, 1)
    assert {tensor_kind(name) for name, tensor in tensors.items() if not tensor.equal(first[name])} == {buffer}
    proof = weight_proof(model, ids=range(20))
    trial._change(buffer, 2)
    assert weight_proof(model, ids=range(20)).logprobs != proof.logprobs


def test_tied_tensors_are_checked_once() -> None:
    model = random_model(tiny_config(transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)))
    assert list(float_tensors(model)) == [name for name, _ in model.named_parameters()]


def test_tiny_model_without_some_tensors_is_refused() -> None:
    _, fields = CONFIGS["AfMoE"]
    with pytest.raises(BadModel, match=r"first 8 layers does not have these tensors: .*expert_bias.*without --tiny"):
        tiny_config(transformers.AfmoeConfig(**{**fields, "num_dense_layers": 9}))


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
@pytest.mark.parametrize(
    ("worker", "tensor"),
    [
        ("StaleOutputWorker", "lm_head.weight"),  # the last tensor, so no engine starts again after its fault
        ("StaleWorker", f"model.layers.*.{STALE}.weight"),
    ],
    ids=["output", "projection"],
)
def test_a_stale_tensor_is_named_and_the_others_are_right(
    worker: str,
    tensor: str,
    llama: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["dtype=float32", f"worker_extension_cls=tests.engines.stale_worker.{worker}"]
    arguments = [argument for option in options for argument in ("--engine-option", option)]
    with pytest.raises(SystemExit) as left:
        app.app(["check-weights", str(llama), "--tiny", "--way", "state-dict", "--json", *arguments])
    assert left.value.code == WRONG_WEIGHTS_CODE
    rows = json.loads(capfd.readouterr().out)["rows"]
    assert len(rows) == 12
    (stale,) = [row for row in rows if row["verdict"] != "right"]
    assert (stale["tensor"], stale["verdict"]) == (tensor, "wrong")
    assert stale["median"] > 1e-3


def test_report_has_a_row_for_each_tensor_and_a_count() -> None:
    tolerance = ProofTolerance(5e-4, 0.05)
    report = WeightReport("tiny", "float32", ProofFigures(95, 1e-6, 4e-6, tolerance))
    report.rows += [
        CheckedTensor("model.norm.weight", Way.FOLDER, TensorVerdict.RIGHT, 1e-6, 4e-6),
        CheckedTensor(
            "lm_head.weight", Way.FOLDER, TensorVerdict.WRONG, 0.2, 1.5, "its scores are those of the old weights"
        ),
        CheckedTensor("lm_head.weight", Way.ADAPTER, TensorVerdict.REFUSED, reason="PEFT is not installed"),
    ]
    written = io.StringIO()
    show(report, Console(file=written, width=200))
    lines = written.getvalue().splitlines()
    assert lines[1].split() == ["folder", "model.norm.weight", "right", "1e-06", "4e-06"]
    assert "wrong" in lines[2]
    assert "0.2" in lines[2]
    assert lines[2].rstrip().endswith("its scores are those of the old weights")
    assert lines[3].rstrip().endswith("PEFT is not installed")
    assert lines[-1].startswith("tiny in float32: 1 right, 1 wrong, 1 refused; with its first weights 95 ids, median")


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
def test_every_way_in_is_right_on_the_command_line(
    llama: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        app.app(["check-weights", str(llama), "--tiny", "--engine-option", "dtype=float32", "--json"])
    assert left.value.code == 0
    report = json.loads(capfd.readouterr().out)
    assert {row["way"] for row in report["rows"]} == set(Way)
    assert {row["verdict"] for row in report["rows"]} == {"right"}
    assert {(row["way"], row["reason"]) for row in report["rows"] if row["reason"]} == {
        ("after-sleep", "on a CPU, vLLM only pauses in sleep, and keeps its memory")
    }


@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.whole
def test_an_engine_that_takes_no_weights_refuses_every_way_by_name(llama: Path) -> None:
    ways = [way for way in Way if way is not Way.FOLDER]
    extension = "tests.engines.stale_worker.PlainWorker"
    report = check_weights(llama, tiny=True, ways=ways, dtype="float32", worker_extension_cls=extension)
    assert {row.verdict for row in report.rows} == {TensorVerdict.REFUSED}
    assert {row.way for row in report.rows} == set(ways)
    assert all("WeightWorker" in row.reason for row in report.rows)


@pytest.fixture
def tiny_llama() -> Any:
    return random_model(tiny_config(transformers.LlamaConfig(**GROUPED)))


def test_adapter_covers_one_kind_and_leaves_the_model_as_it_was(tiny_llama: Any) -> None:
    first = {name: tensor.clone() for name, tensor in tiny_llama.state_dict().items()}
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        before = tiny_llama(ids).logits
        kinds = linear_kinds(tiny_llama)
        assert "lm_head" not in kinds
        assert len(kinds) == 7
        for kind in kinds:
            with adapter_on(tiny_llama, kind) as (adapted, tensors, config):
                assert not torch.allclose(adapted(ids).logits, before)
                assert {tensor_kind(name.removeprefix("base_model.model.")) for name in tensors} == {
                    f"{kind}.lora_A.weight",
                    f"{kind}.lora_B.weight",
                }
                json.dumps(config)
            assert torch.equal(tiny_llama(ids).logits, before)
    assert {name: tensor.equal(first[name]) for name, tensor in tiny_llama.state_dict().items()} == dict.fromkeys(
        first, True
    )


def test_layer_that_peft_refuses_is_named() -> None:
    """PEFT refuses adapters on a Mamba layer's output, since the layer's kernel reads its weight directly."""
    config = transformers.FalconH1Config(num_hidden_layers=2, hidden_size=64, intermediate_size=64, vocab_size=100)
    model = random_model(tiny_config(config, vocabulary=100))
    (kind,) = (kind for kind in linear_kinds(model) if kind.endswith("mamba.out_proj"))
    with pytest.raises(BadWeights, match=r"PEFT has no adapter on .*mamba.out_proj: "), adapter_on(model, kind):
        pass


def test_adapters_without_peft_are_refused(tiny_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with (
        pytest.raises(BadOption, match="PEFT, which is not installed: pip install peft"),
        adapter_on(tiny_llama, linear_kinds(tiny_llama)[0]),
    ):
        pass


def test_unknown_transfer_backend_is_refused(tiny_llama: Any, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"'email'.*the check supports 'file', 'ipc' and 'nccl'"):
        local_transfer({"weight_transfer_config": {"backend": "email"}}, tiny_llama, tmp_path)


def test_nccl_joins_the_trainer_and_every_worker(tiny_llama: Any, tmp_path: Path) -> None:
    arguments = {"weight_transfer_config": {"backend": "nccl"}, "tensor_parallel_size": 2, "data_parallel_size": 3}
    info = local_transfer(arguments, tiny_llama, tmp_path).info
    assert (info.rank, info.world_size, info.master_address) == (0, 7, "127.0.0.1")
    assert 1024 <= info.master_port < 65536


def test_a_way_that_is_not_there_is_refused_by_name(llama: Path) -> None:
    with pytest.raises(BadOption, match=r"check_weights\(ways='email'\): give some of folder, state-dict"):
        check_weights(llama, ways=["email"])
    with pytest.raises(SystemExit) as left:
        app.app(["check-weights", str(llama), "--way", "email"])
    assert left.value.code == 2


def save_sparse_model(folder: Path, values: int) -> Path:
    """Save a checkpoint of one bfloat16 tensor, as a file with a size but no data on the disk."""
    folder.mkdir()
    transformers.LlamaConfig(**GROUPED, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    entry = {"dtype": "BF16", "shape": [values], "data_offsets": [0, 2 * values]}
    header = json.dumps({"lm_head.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * values)
    return folder


@pytest.mark.parametrize(
    ("dtype", "needed"),
    [("bfloat16", "12000.0 GB for transformers in float32"), ("float32", "8000.0 GB for transformers in float32")],
)
def test_model_that_needs_too_much_memory_is_refused_first(dtype: str, needed: str, tmp_path: Path) -> None:
    folder = save_sparse_model(tmp_path / "huge", 10**12)
    with pytest.raises(BadOption, match=r"check_weights\(huge\): 1,000.0 billion values need") as raised:
        check_weights(folder, ways=["same"], dtype=dtype)
    assert needed in str(raised.value)
    assert "check the same architecture with --tiny (tiny=True), or free memory" in str(raised.value)


def test_memory_of_a_checkpoint_without_safetensors_is_unknown(tmp_path: Path) -> None:
    check_memory(tmp_path, "float32", on_cpu=True)


def test_memory_of_a_model_on_a_cpu_includes_its_engine(tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    folder = save_sparse_model(tmp_path / "between", free // 16)  # 14 bytes for each value on a GPU, and 18 on a CPU
    check_memory(folder, "bfloat16", on_cpu=False)
    with pytest.raises(BadOption, match="for the engine and its update"):
        check_memory(folder, "bfloat16", on_cpu=True)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadModel):
        check_weights(tmp_path / "nothing", tiny=True)


@pytest.mark.parametrize(("share", "seen"), [(0.0, False), (0.5, False), (1.0, True)])
def test_movement_that_is_not_the_trainers_is_unseen(share: float, seen: bool, tiny_llama: Any, tmp_path: Path) -> None:
    """Random changes within rounding may correlate with the trainer's change by chance."""
    trial, verdicts = _Trial(tmp_path, tiny_llama, tmp_path, {}), set()
    trial.dtype = trial._computed_in = "bfloat16"
    for seed in range(200):
        rng, size = np.random.default_rng(seed), 95
        first: Any = -4 - np.abs(rng.normal(size=size))
        change: Any = rng.normal(0, 0.04, size)
        fields: dict[str, Any] = {"dtype": "float32", "weights_dtype": "bfloat16"}
        trial._accepted = Accepted(WeightProof(range(96), first, **fields), first)
        scores = first + share * change + rng.normal(0, 0.04, size)
        proof = WeightProof(range(96), first + change, **fields)
        verdicts.add(trial._judged("norm", Way.FOLDER, proof, {ScoredPass(): scores.tolist()}).verdict)
    assert TensorVerdict.WRONG not in verdicts if seen else TensorVerdict.RIGHT not in verdicts
    assert (TensorVerdict.RIGHT if seen else TensorVerdict.UNSEEN) in verdicts


# --- an engine without vLLM, with the weights of a torch model


class TorchEngine(ScriptedEngine):
    """Engine that loads the weights of `source` at its first updates, and none later."""

    stale_steps = False
    """True for an engine that scores ids in steps with its first weights."""

    def __init__(self, source: Any, *, takes: int) -> None:
        super().__init__("Yes", context=512, scores=lambda ids: weight_proof(self.loaded, ids=ids).logprobs)
        self.trained, self.loaded, self._takes = source, copy.deepcopy(source), takes
        self.first = copy.deepcopy(source)
        self.vllm = SimpleNamespace(llm=None, proofs=ProofHistory())

    async def score(self, ids: Any, *, start: int = 1, sampling: Any = None, constraint: Any = None) -> list[float]:
        model = self.first if self.stale_steps and sampling is not None else self.loaded
        return list(weight_proof(model, ids=ids).logprobs[start - 1 :])

    async def update_weights(self, given: Any, **options: Any) -> Any:
        if self._takes:
            self._takes -= 1
            self.loaded.load_state_dict(given if isinstance(given, dict) else self.trained.state_dict())
        return await super().update_weights(given, **options)


@pytest.fixture
def small_llama() -> Any:
    return random_model(tiny_config(transformers.LlamaConfig(**GROUPED), vocabulary=250))


def check_with(
    engines: Iterable[Any],
    model: Any,
    ways: Sequence[Way],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tiny: bool = False,
) -> WeightReport:
    """Check a model. Each start uses the next of these engines; if the next one is an error, it is raised."""
    given = iter(engines)

    def start(*_: Any, **__: Any) -> Any:
        engine = next(given)
        if isinstance(engine, Exception):
            raise engine
        return engine

    monkeypatch.setattr(weight_check, "VllmEngine", start)
    monkeypatch.setattr(weight_check, "dtype_of", lambda _: "float32")
    monkeypatch.setattr(weight_check, "_load", lambda *_, **__: (folder, model))
    return check_weights(folder, ways=ways, tiny=tiny)


def test_stale_weights_of_the_steps_alone_are_wrong(
    small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(small_llama, takes=2)
    engine.stale_steps = True
    monkeypatch.setattr(EngineRuntime, "scores_in_steps", True)
    (row,) = check_with([engine], small_llama, [Way.AFTER_SLEEP], tmp_path, monkeypatch).rows
    assert row.verdict is TensorVerdict.WRONG
    assert row.reason.startswith("for ids in steps, as turns sample them, but not in a prompt, the engine's log-")


def test_rows_stay_where_an_engine_does_not_start_again(
    small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [TorchEngine(small_llama, takes=2), BadModel("no memory is left")]
    report = check_with(engines, small_llama, [Way.STATE_DICT], tmp_path, monkeypatch)
    verdicts = [(row.tensor, row.verdict) for row in report.rows]
    assert verdicts == [
        ("model.embed_tokens.weight", TensorVerdict.RIGHT),
        ("model.layers.*.self_attn.q_proj.weight", TensorVerdict.RIGHT),
        ("model.layers.*.self_attn.k_proj.weight", TensorVerdict.WRONG),
    ]
    assert report.failure == (
        "the last 9 rows are missing, from model.layers.*.self_attn.v_proj.weight (state-dict) on: BadModel: no memory "
        "is left"
    )
    assert report.as_dict()["failure"] == report.failure
    written = io.StringIO()
    show(report, Console(file=written, width=200))
    assert f"ended early: {report.failure}" in written.getvalue()


def test_rows_after_a_wrong_one_are_those_of_a_new_engine(
    small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [TorchEngine(small_llama, takes=2), TorchEngine(small_llama, takes=9)]
    report = check_with(engines, small_llama, [Way.STATE_DICT], tmp_path, monkeypatch)
    verdicts = [row.verdict for row in report.rows]
    assert verdicts == [*[TensorVerdict.RIGHT] * 2, TensorVerdict.WRONG, *[TensorVerdict.RIGHT] * 9]


def test_tiny_model_of_a_quantized_one_notes_its_plain_weights(
    small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_llama.config.to_dict() | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = TorchEngine(small_llama, takes=1)
    report = check_with([engine], small_llama, [Way.SAME], tmp_path, monkeypatch, tiny=True)
    assert "the weights are quantized (awq), and those of the tiny model are not" in report.as_dict()["note"]
    written = io.StringIO()
    show(report, Console(file=written, width=300))
    assert f"note: {report.note}" in written.getvalue()


def test_check_that_ended_early_has_the_exit_code_of_wrong_weights(
    small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small_llama.save_pretrained(tmp_path / "model")

    def run_out(*_: Any, **__: Any) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(small_llama, "save_pretrained", run_out)
    engine = TorchEngine(small_llama, takes=1)
    monkeypatch.setattr(weight_check, "VllmEngine", lambda *_, **__: engine)
    monkeypatch.setattr(weight_check, "dtype_of", lambda _: "float32")
    monkeypatch.setattr(weight_check, "_load", lambda *_, **__: (tmp_path, small_llama))
    with pytest.raises(SystemExit) as left:
        app.app(["check-weights", "model", "--way", "state-dict", "--way", "folder", "--json"])
    assert left.value.code == WRONG_WEIGHTS_CODE


@pytest.mark.parametrize("way", [Way.TWICE, Way.TRANSFER])
@pytest.mark.parametrize(
    ("takes", "verdict"), [(0, TensorVerdict.WRONG), (1, TensorVerdict.WRONG), (2, TensorVerdict.RIGHT)]
)
def test_each_of_two_updates_in_a_row_is_checked(
    way: Way, takes: int, verdict: TensorVerdict, small_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = check_with([TorchEngine(small_llama, takes=takes)], small_llama, [way], tmp_path, monkeypatch)
    assert [row.verdict for row in report.rows] == [verdict]
