"""SamplingParams, EngineRequest, Request and the messages of outputs.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from hocket.errors import ConfigError
from hocket.generation_config import GenerationConfig, merge_token_ids
from hocket.outputs import CompletionOutput, TokenLogprobs, TokenOutput
from hocket.prompt import parse_prompt, parse_prompts
from hocket.request import EngineRequest, Request, RequestStatus, SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", True),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", 1.1),
    ("seed", 2**63),
    ("max_tokens", 0),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("logprobs", -2),
    ("prompt_logprobs", -2),
    ("stop", [""]),
    ("stop", [3]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("allowed_token_ids", []),
    ("logit_bias", {-1: 0.0}),
    ("logit_bias", {1: float("inf")}),
    ("bad_words", [""]),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_wrong_values_name_the_field_in_one_line(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.0, 0.0, 0.0)
    assert params.detokenize
    assert params.skip_special_tokens
    assert params.spaces_between_special_tokens
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output


def test_values_are_normalized() -> None:
    params = SamplingParams(stop="x", top_k=-1, seed=-1)
    assert (params.stop, params.stop_token_ids, params.bad_words) == (["x"], [], [])
    assert (params.top_k, params.seed) == (0, None)
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.1)
    assert greedy.is_greedy
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)


def test_combinations_that_are_refused() -> None:
    with pytest.raises(ConfigError, match="n: 2"):
        SamplingParams(n=2, temperature=0)
    with pytest.raises(ConfigError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_messages_survive_msgpack() -> None:
    params = SamplingParams(stop="x", logit_bias={3: 1.5}, max_tokens=None, seed=5, bad_words=["no"], temperature=0)
    sent = EngineRequest("0_a", [1, 2], params, [7], [[1, 2]], 9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineRequest) == sent
    output = TokenOutput("r", [1], [TokenLogprobs([1, 2], [-0.5, -1.0], 1)], [None], "stop", "x", 4)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=TokenOutput) == output


def test_a_wrong_value_cannot_be_smuggled_in_by_a_message() -> None:
    raw = msgspec.msgpack.encode({"top_p": 3.0})
    with pytest.raises(msgspec.ValidationError, match="top_p"):
        msgspec.msgpack.decode(raw, type=SamplingParams)


def test_request_counts_prompt_and_output() -> None:
    sent = EngineRequest("r", [5, 6, 7], SamplingParams(), max_tokens=4)
    request = Request(sent)
    assert request.status is RequestStatus.WAITING
    assert (request.num_prompt_tokens, request.num_tokens, request.num_output_tokens) == (3, 3, 0)
    request.token_ids.append(8)
    assert sent.prompt_token_ids == [5, 6, 7]
    assert (request.output_token_ids, request.num_tokens, request.num_output_tokens) == ([8], 4, 1)
    assert "r" in repr(request)
    with pytest.raises(AttributeError):
        request.unknown = 1  # type: ignore[attr-defined]


def test_is_prefilling_until_only_the_last_token_is_left() -> None:
    request = Request(EngineRequest("r", [5, 6, 7], SamplingParams()))
    for computed, prefilling in ((0, True), (2, True), (3, False)):
        request.num_computed_tokens = computed
        assert request.is_prefilling is prefilling
    request.token_ids += [8, 9]
    for computed, prefilling in ((0, True), (3, True), (4, False), (5, False)):
        request.num_computed_tokens = computed
        assert request.is_prefilling is prefilling


def test_seed_is_the_given_one_or_follows_from_the_id() -> None:
    assert Request(EngineRequest("r", [1], SamplingParams(seed=5))).seed == 5
    first, again, other = (Request(EngineRequest(name, [1], SamplingParams())).seed for name in ("a", "a", "b"))
    assert first == again != other
    assert 0 <= Request(EngineRequest("r", [1], SamplingParams(seed=-7))).seed < 2**63


def test_completion_is_finished_with_its_reason() -> None:
    completion = CompletionOutput(0, "", [])
    assert not completion.finished
    completion.finish_reason = "length"
    assert completion.finished


def test_prompt_forms() -> None:
    assert parse_prompts("a") == ["a"]
    assert parse_prompts(["a", "b"]) == ["a", "b"]
    assert parse_prompts([1, 2]) == [[1, 2]]
    assert parse_prompts([[1], {"prompt": "x"}]) == [[1], {"prompt": "x"}]
    assert parse_prompts([]) == []
    assert (parse_prompt("a").text, parse_prompt("a").token_ids) == ("a", None)
    assert parse_prompt((1, 2)).token_ids == [1, 2]
    both = parse_prompt({"prompt": "a", "prompt_token_ids": [1]})
    assert (both.text, both.token_ids) == ("a", [1])


@pytest.mark.parametrize("prompt", [3, None, b"x", {}, {"text": "x"}, {"prompt": 3}, {"prompt": "a", "image": 1}, [-1]])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError):
        parse_prompt(prompt)


@pytest.mark.parametrize("prompts", [3, None, b"x"])
def test_what_is_neither_a_prompt_nor_a_list_is_refused(prompts: Any) -> None:
    with pytest.raises(ConfigError, match="prompts"):
        parse_prompts(prompts)


def test_generation_config_sets_defaults(tmp_path: Any) -> None:
    assert GenerationConfig.from_pretrained(tmp_path).sampling_params() == SamplingParams()
    file = tmp_path / "generation_config.json"
    file.write_text(
        '{"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": null,'
        ' "max_new_tokens": 7, "eos_token_id": [4, 3]}'
    )
    config = GenerationConfig.from_pretrained(tmp_path)
    assert config.eos_token_ids == (4, 3)
    assert config.sampling_params() == SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    for wrong in ('{"top_p": 2}', "[1]", "{", '{"eos_token_id": "x"}'):
        file.write_text(wrong)
        with pytest.raises(ConfigError):
            GenerationConfig.from_pretrained(tmp_path)


def test_an_unreadable_generation_config_is_one_line(tmp_path: Any) -> None:
    (tmp_path / "generation_config.json").mkdir()  # as unreadable to root as to anybody
    with pytest.raises(ConfigError, match="readable JSON"):
        GenerationConfig.from_pretrained(tmp_path)


def test_merge_token_ids_keeps_order_once() -> None:
    assert merge_token_ids(None, 3, [4, 3], (5,)) == (3, 4, 5)


def test_front_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, hocket.request, hocket.outputs, hocket.prompt, hocket.generation_config, hocket.processor\n"
        "import hocket.tokenizer.tokenizer, hocket.tokenizer.detokenizer, hocket.tokenizer.chat\n"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


NUMPY: list[tuple[str, Any]] = [
    ("n", np.int32(2)),
    ("temperature", np.float64(0.5)),
    ("temperature", np.float32(0.5)),
    ("top_p", np.float16(0.5)),
    ("repetition_penalty", np.int64(2)),
    ("top_k", np.int64(5)),
    ("seed", np.uint64(2**63 - 1)),
    ("max_tokens", np.int8(9)),
    ("min_tokens", np.uint8(9)),
    ("logprobs", np.int64(3)),
    ("prompt_logprobs", np.int64(3)),
    ("stop", (np.str_("x"),)),
    ("stop_token_ids", (np.int64(3), 4)),
    ("allowed_token_ids", [np.uint16(3)]),
    ("logit_bias", {np.int64(3): np.float32(0.5)}),
    ("ignore_eos", np.bool_(True)),
]


@pytest.mark.parametrize(("field", "value"), NUMPY)
def test_numpys_scalars_become_plain_ones_that_can_be_sent(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    taken = getattr(params, field)
    assert taken == (list(value) if isinstance(value, tuple) else value)
    parts = [*taken, *taken.values()] if isinstance(taken, dict) else taken if isinstance(taken, list) else [taken]
    assert {type(part).__module__ for part in parts} == {"builtins"}
    sent = EngineRequest("r", [1], params)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=EngineRequest) == sent


TOO_MUCH: list[tuple[str, Any]] = [
    *((name, 2**63) for name in ("top_k", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "seed")),
    ("seed", 10**5000),
    ("seed", -(2**63) - 1),
    ("n", 16385),
    ("stop_token_ids", [2**63]),
    ("allowed_token_ids", [2**64]),
    ("temperature", 1.1e4),
    ("temperature", 10**400),
    ("temperature", np.float32("nan")),
    ("repetition_penalty", 1e-30),
    ("repetition_penalty", 1e30),
    ("logit_bias", {1: float("nan")}),
    ("logit_bias", [1]),
    ("stop", "\ud800"),
    ("bad_words", ["\ud800"]),
    ("ignore_eos", "no"),
    ("detokenize", 2),
]


@pytest.mark.parametrize(("field", "value"), TOO_MUCH, ids=[f"{i}-{name}" for i, (name, _) in enumerate(TOO_MUCH)])
def test_what_could_not_be_sent_or_computed_with_is_refused(field: str, value: Any) -> None:
    test_wrong_values_name_the_field_in_one_line(field, value)


def test_logit_bias_is_clamped() -> None:
    assert SamplingParams(logit_bias={1: 1e30, 2: -1e300, 3: 7}).logit_bias == {1: 100.0, 2: -100.0, 3: 7.0}


def test_clone_shares_nothing_and_checks_what_was_set() -> None:
    params = SamplingParams(stop=["x"], stop_token_ids=[1], allowed_token_ids=[1, 2], logit_bias={1: 2.0}, seed=3)
    copy = params.clone()
    assert copy == params
    for field in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logit_bias"):
        assert getattr(copy, field) is not getattr(params, field)
    params.temperature = float("nan")
    with pytest.raises(ConfigError, match="temperature"):
        params.clone()


def test_a_message_about_a_wrong_value_is_one_short_line() -> None:
    value = "line\n" * 10_000
    for wrong in (value, np.zeros((50, 50)), [value], 10**5000):
        error = ConfigError("field", wrong, "one\nthing\n\nor another")
        assert error.value is wrong
        assert "\n" not in str(error)
        assert len(str(error)) < 300
    assert str(ConfigError("field", "a  b", "x")) == "field: 'a  b' is not allowed; allowed: x"
    assert str(ConfigError("field", 1, "x", where="with y")) == "field: 1 is not allowed with y; allowed: x"
    assert str(ConfigError("field", None, "x", where="with y")) == "field: is missing with y; allowed: x"
