"""Settings for vLLM, tested without vLLM."""

import copy
import dataclasses
import importlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.engines.base import GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import BINDING
from runner.engines.vllm.settings import (
    bad_word_ids,
    cache_constraint_checks,
    choose_settings,
    constraint_arguments,
    sampling_arguments,
)
from runner.errors import BadModel, BadOption
from runner.options import Constraint, ConstraintKind, Sampling
from runner.sampling_fields import MAX_LOGPROBS
from runner.tokens.byte_tokenizer import ByteTokenizer

KNOWN = frozenset(
    [
        "max_num_seqs",
        "max_num_batched_tokens",
        "block_size",
        "enforce_eager",
        "logprobs_mode",
        "disable_log_stats",
        "tensor_parallel_size",
        "data_parallel_size",
        "dtype",
        "model",
    ]
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("VLLM_"):
            monkeypatch.delenv(name)


def test_cpu_engine_binds_cores_and_uses_small_blocks() -> None:
    settings = choose_settings({}, cpu=True, known=KNOWN)
    assert settings.arguments["block_size"] == 32
    assert settings.arguments["enforce_eager"] is True
    cores = {int(core) for core in settings.environment["VLLM_CPU_OMP_THREADS_BIND"].split(",")}
    assert cores == os.sched_getaffinity(0)
    assert int(settings.environment["VLLM_CPU_KVCACHE_SPACE"]) >= 1


def test_a_gpu_engine_is_left_its_own_blocks() -> None:
    settings = choose_settings({}, cpu=False, known=KNOWN)
    assert {"block_size", "enforce_eager"}.isdisjoint(settings.arguments)
    assert settings.environment == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


@pytest.mark.parametrize("cpu", [True, False], ids=["cpu", "gpu"])
def test_sizes_and_logprobs_are_set_on_purpose(cpu: bool) -> None:
    settings = choose_settings({}, cpu=cpu, known=KNOWN)
    assert settings.arguments["logprobs_mode"] == "processed_logprobs"
    assert {"max_num_seqs", "max_num_batched_tokens"} <= set(settings.arguments)
    assert settings.chosen == {**settings.arguments, **settings.environment}


def test_user_settings_win_and_are_not_listed_as_chosen() -> None:
    settings = choose_settings({"block_size": 64, "dtype": "float32"}, cpu=True, known=KNOWN)
    assert (settings.arguments["block_size"], settings.arguments["dtype"]) == (64, "float32")
    assert {"block_size", "dtype"}.isdisjoint(settings.chosen)


def test_a_variable_the_user_set_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "12")
    settings = choose_settings({}, cpu=True, known=KNOWN)
    assert "VLLM_CPU_KVCACHE_SPACE" not in settings.environment | settings.chosen


@pytest.mark.parametrize("size", ["tensor_parallel_size", "data_parallel_size"])
def test_workers_share_all_cores_and_the_memory_among_them(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(5)))
    alone, two = (choose_settings({size: count}, cpu=True, known=KNOWN).environment for count in (1, 2))
    first, second = ({int(core) for core in share.split(",")} for share in two[BINDING].split("|"))
    assert first | second == set(range(5))
    assert not first & second
    assert int(two["VLLM_CPU_KVCACHE_SPACE"]) <= int(alone["VLLM_CPU_KVCACHE_SPACE"])


def test_workers_that_are_partly_on_other_machines_are_bound_by_vllm() -> None:
    settings = choose_settings({"data_parallel_size": 2, "nnodes": 2}, cpu=True, known=KNOWN | {"nnodes"})
    assert BINDING not in settings.environment


def test_older_vllm_gets_no_unknown_argument() -> None:
    settings = choose_settings({}, cpu=False, known=KNOWN - {"logprobs_mode"})
    assert "logprobs_mode" not in settings.arguments


@pytest.mark.parametrize("name", ["model", "stream_interval", "max_seqs"])
def test_unusable_arguments_are_refused_by_name(name: str) -> None:
    with pytest.raises(BadOption, match=name):
        choose_settings({name: 1}, cpu=True, known=KNOWN)


def arguments_of(
    *, known: frozenset[str] = frozenset({"stream_interval", "skip_clone"}), **fields: Any
) -> dict[str, Any]:
    sampling = dataclasses.replace(Sampling.defaults(), stop_ids=(7, 2))
    request = GenerationRequest(name="one", prompt=[1], sampling=sampling, stop_ids=(2, 5), **fields)
    return sampling_arguments(request, stream_interval=8, known=known)


def test_exactly_the_ids_given_end_a_turn() -> None:
    arguments = arguments_of()
    assert arguments["stop_token_ids"] == [2, 5, 7]
    assert arguments["ignore_eos"] is True


def test_stream_interval_is_one_when_deltas_are_acted_on() -> None:
    assert arguments_of()["stream_interval"] == 8
    assert arguments_of(acts_on_deltas=True)["stream_interval"] == 1
    assert "stream_interval" not in arguments_of(known=frozenset())


def test_forced_ids_reach_the_engine() -> None:
    assert arguments_of(extra={"force": [1, 2]})["extra_args"] == {"force": [1, 2]}
    assert arguments_of()["extra_args"] is None


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint(ConstraintKind.JSON, '{"type": "object"}'), {"json": '{"type": "object"}'}),
        (Constraint(ConstraintKind.REGEX, "a+"), {"regex": "a+"}),
        (Constraint(ConstraintKind.GRAMMAR, "root ::= x"), {"grammar": "root ::= x"}),
        (Constraint(ConstraintKind.CHOICE, '["a", "b"]'), {"choice": ["a", "b"]}),
        (Constraint(ConstraintKind.STRUCTURAL_TAG, "{}"), {"structural_tag": "{}"}),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Constraint) else "",
)
def test_each_kind_of_constraint_has_its_place(constraint: Constraint, expected: dict[str, Any]) -> None:
    assert constraint_arguments(constraint) == expected


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
async def test_model_without_stop_ids_is_refused_before_the_start(demo_model_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
        text = (demo_model_folder / name).read_text(encoding="utf-8")
        if name.endswith("config.json"):
            text = json.dumps({key: value for key, value in json.loads(text).items() if not key.startswith("eos_")})
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(BadModel, match=r"nothing ends a turn of .* eos_token_id\. Add one"):
        async with VllmEngine(tmp_path):
            pass


def test_fields_of_sampling_go_to_vllm_by_their_names() -> None:
    fields: dict[str, Any] = {
        "min_tokens": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {7: 1.5},
        "logprobs": 5,
    }
    sampling = dataclasses.replace(Sampling.defaults(), **fields)
    arguments = sampling_arguments(
        GenerationRequest(name="one", prompt=[1], sampling=sampling), stream_interval=8, known=frozenset()
    )
    assert {name: arguments[name] for name in fields} == fields


def test_engine_allows_as_many_top_ids_as_a_sampling() -> None:
    assert choose_settings({}, cpu=True, known=KNOWN | {"max_logprobs"}).arguments["max_logprobs"] == MAX_LOGPROBS
    own = choose_settings({"max_logprobs": 5}, cpu=True, known=KNOWN | {"max_logprobs"})
    assert own.arguments["max_logprobs"] == 5


def test_a_bad_word_is_spelled_alone_and_after_a_space() -> None:
    encode = ByteTokenizer().encode
    assert bad_word_ids(("moon", " sun"), encode) == [list(text.encode()) for text in ("moon", " moon", "sun", " sun")]
    assert bad_word_ids(("moon", "moon"), encode) == bad_word_ids(("moon",), encode)


class Parameters:
    """Stand-in for the part of vLLM's `SamplingParams` that checks constraints."""

    checks = 0

    def __init__(self, **constraint: Any) -> None:
        self.structured_outputs = SimpleNamespace(_backend=None, **constraint)

    def _validate_structured_outputs(self, *_: Any) -> None:
        type(self).checks += 1
        if self.structured_outputs.grammar == "wrong":
            raise ValueError("Invalid grammar specification.")
        self.structured_outputs._backend = "xgrammar"


@pytest.mark.parametrize(
    ("constraints", "checks"),
    [
        ([{"grammar": "one"}] * 3, 1),
        ([{"grammar": "one"}, {"grammar": "two"}, {"grammar": "one"}], 2),
        ([{"grammar": "one"}, {"grammar": "one", "whitespace_pattern": " "}], 2),
        ([{"grammar": "wrong"}] * 3, 3),
        ([{"grammar": None, "json": {"type": "object"}}] * 2, 2),
        ([{"grammar": None, "choice": ["a", "b"]}] * 2, 2),
    ],
)
def test_a_constraint_is_checked_once_by_all_of_its_text(constraints: list[dict[str, Any]], checks: int) -> None:
    kind = cache_constraint_checks(type("Fresh", (Parameters,), {}))
    for constraint in constraints:
        made = kind(**constraint)
        if constraint["grammar"] == "wrong":
            with pytest.raises(ValueError, match="Invalid grammar"):
                made._validate_structured_outputs("model", "config", "tokenizer")
        else:
            made._validate_structured_outputs("model", "config", "tokenizer")
            assert made.structured_outputs._backend == "xgrammar"
    assert kind.checks == checks


def test_engines_check_constraints_each_for_itself() -> None:
    base = type("Fresh", (Parameters,), {})
    kinds = [cache_constraint_checks(base), cache_constraint_checks(base)]
    for kind in kinds:
        kind(grammar="one")._validate_structured_outputs()
    assert [kind.checks for kind in kinds] == [1, 1]


def test_a_vllm_that_checks_elsewhere_is_left_as_it_is() -> None:
    assert cache_constraint_checks(dict) is dict


def test_cached_constraint_checks_send_the_bytes_of_vllm() -> None:
    sampling_params = pytest.importorskip("vllm.sampling_params")
    encode = importlib.import_module("vllm.v1.serial_utils").MsgpackEncoder().encode
    kinds = sampling_params.SamplingParams, cache_constraint_checks(sampling_params.SamplingParams)
    sent = []
    for kind in kinds:
        constraint = sampling_params.StructuredOutputsParams(grammar='root ::= "a"')
        made = kind(temperature=0.0, max_tokens=4, skip_clone=True, structured_outputs=constraint)
        sent.append(b"".join(map(bytes, encode(copy.copy(made)))))
    assert sent[0] == sent[1]
