"""JSON schemas: which tokens may come next, what is refused, and outputs that are what the schema says."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest
import torch
from in_process import in_process_llm

pytest.importorskip("llguidance")

from hocket.config.resolve import model_folder
from hocket.errors import BackendUnavailable, ConfigError
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.tokenizer.grammar import MAX_SCHEMA_BYTES, Grammars
from hocket.tokenizer.tokenizer import Tokenizer
from hocket.worker.logits import process_logits

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_pretrained(model_folder("tiny"))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size + 5)  # a model may have more rows than the tokenizer has tokens


def eos_of(tokenizer: Tokenizer) -> list[int]:
    assert tokenizer.eos_token_id is not None
    return [tokenizer.eos_token_id]


def test_a_follower_allows_what_the_schema_does_and_then_the_end(tokenizer: Tokenizer, grammars: Grammars) -> None:
    width = tokenizer.vocab_size + 5
    follower = grammars.follow(json.dumps(PERSON), eos_of(tokenizer))
    ids = tokenizer.encode('{"name": "Emma", "age": 21}', add_special_tokens=False)
    taken: list[int] = []
    for token_id in ids:
        allowed = follower.allowed(taken, width)
        assert allowed.shape == (width,)
        assert allowed[token_id]
        assert not allowed[eos_of(tokenizer)[0]]
        assert not allowed[-5:].any()
        taken = [token_id]
    assert follower.allowed(taken, width).nonzero()[0].tolist() == eos_of(tokenizer)
    assert follower.num_tokens == len(ids)
    astray = grammars.follow(json.dumps(PERSON), eos_of(tokenizer))
    assert astray.allowed(tokenizer.encode("Emma", add_special_tokens=False), width).nonzero()[0].tolist() == eos_of(
        tokenizer
    )


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("{", "EOF"),
        ("5", "object"),
        ('{"type": "nonsense"}', "nonsense"),
        ('{"$ref": "#/nowhere"}', "nowhere"),
        ('{"type": "string", "pattern": "("}', "unclosed"),
        (json.dumps({"enum": ["x" * 100] * 1000}), f"{MAX_SCHEMA_BYTES} bytes"),
        ('{"items":' * 1500 + "{}" + "}" * 1500, "recursion"),
        (
            json.dumps(
                {
                    "allOf": [
                        {"anyOf": [{"type": "object", "properties": {f"a{i}{j}": {}}} for j in range(10)]}
                        for i in range(8)
                    ]
                }
            ),
            "too large",
        ),
    ],
    ids=range(8),
)
def test_schemas_that_cannot_be_followed_are_refused(
    tokenizer: Tokenizer, grammars: Grammars, schema: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        grammars.check(schema, eos_of(tokenizer))
    assert caught.value.field == "json_schema"


def test_what_params_take() -> None:
    assert json.loads(str(SamplingParams(json_schema=PERSON).json_schema)) == PERSON
    assert SamplingParams(json_schema="{}").json_schema == "{}"
    for wrong in (5, ["a"], {"a": math.nan}, {"a": object()}):
        with pytest.raises(ConfigError, match="json_schema"):
            SamplingParams(json_schema=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="ignore_eos"):
        SamplingParams(json_schema="{}", ignore_eos=True)


def test_the_schema_wins_over_what_else_forbids_tokens(tokenizer: Tokenizer, grammars: Grammars) -> None:
    brace = tokenizer.encode("{", add_special_tokens=False)[0]
    other = tokenizer.encode("the", add_special_tokens=False)[0]
    logits = torch.randn(2, tokenizer.vocab_size, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    params = SamplingParams(json_schema=PERSON, allowed_token_ids=[other], bad_words=["{"])
    request = Request(EngineRequest("a", [5], params, eos_token_ids=eos_of(tokenizer), bad_words_ids=[[brace]]))
    request.follower = grammars.follow(json.dumps(PERSON), eos_of(tokenizer))
    plain = Request(EngineRequest("b", [5], SamplingParams()))
    processed = process_logits(logits, [request, plain])
    assert processed[0].isfinite().nonzero().flatten().tolist() == [brace]
    assert processed[0, brace] == before[0, brace]
    assert torch.equal(processed[1], before[1])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 5.0, "n": 8, "min_tokens": 30}])
def test_outputs_are_json_of_the_schema(params: dict[str, Any]) -> None:
    with in_process_llm("tiny", skip_tokenizer_init=False) as llm:
        given = SamplingParams(max_tokens=200, seed=3, json_schema=PERSON, logprobs=1, **params)
        texts = ["Who was Emma?", "In the beginning"]
        plain = SamplingParams(max_tokens=5, temperature=0.0)
        alone = llm.generate(texts[1], plain, use_tqdm=False)[0].outputs[0].token_ids
        outputs = llm.generate([texts[0], texts[1]], [given, plain], use_tqdm=False)
        for completion in outputs[0].outputs:
            assert completion.finish_reason == "stop"
            person = json.loads(completion.text)
            assert person.keys() == {"name", "age"}
            assert 0 <= person["age"] <= 99
            assert len(person["name"]) <= 6
        assert outputs[1].outputs[0].token_ids == alone
        with pytest.raises(ConfigError, match="json_schema"):
            llm.generate(texts, SamplingParams(json_schema='{"type": "nonsense"}'), use_tqdm=False)
    with in_process_llm("tiny") as llm, pytest.raises(ConfigError, match="skip_tokenizer_init"):
        llm.generate([[5]], SamplingParams(json_schema="{}", detokenize=False), use_tqdm=False)


def test_r103_without_the_package_it_is_said(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(BackendUnavailable, match="pip install llguidance"):
        Grammars(tokenizer, tokenizer.vocab_size).check("{}", eos_of(tokenizer))
