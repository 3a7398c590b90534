"""The front's two translations."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
from small_tokenizers import byte_level

from hocket.errors import CapacityError, ConfigError
from hocket.generation_config import GenerationConfig
from hocket.outputs import Logprob, RequestOutput, TokenLogprobs, TokenOutput
from hocket.processor import Processor
from hocket.request import EngineRequest, SamplingParams

tokenizer = functools.cache(byte_level)


def processor(**options: Any) -> Processor:
    given = {"tokenizer": tokenizer(), "vocab_size": 512, "max_model_len": 64, "seed": 0} | options
    return Processor(**given)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def add(front: Processor, prompt: Any, request_id: str = "r", **params: Any) -> EngineRequest:
    [request] = front.add(request_id, prompt, SamplingParams(**params))
    return request


def feed(front: Processor, engine_id: str, ids: list[int], **fields: Any) -> RequestOutput:
    output = front.process(TokenOutput(engine_id, ids, **fields))
    assert output is not None
    return output


def test_a_prompt_in_each_form() -> None:
    front = processor()
    text = "In the beginning"
    numbers = itertools.count()
    for prompt in (text, {"prompt": text}, {"prompt_token_ids": ids_of(text)}, ids_of(text)):
        assert add(front, prompt, f"r{next(numbers)}").prompt_token_ids == ids_of(text)
    both = add(front, {"prompt": "shown", "prompt_token_ids": [5]}, "both")
    assert both.prompt_token_ids == [5]
    output = feed(front, "both", ids_of("a"), finish_reason="length")
    assert (output.prompt, output.prompt_token_ids) == ("shown", [5])
    assert front.num_unfinished == 4


def test_text_grows_until_the_request_is_finished() -> None:
    times = iter(range(10))
    front = processor(clock=lambda: float(next(times)))
    add(front, "In the", max_tokens=None)
    ids = ids_of(" beginning God")
    for count, token in enumerate(ids[:-1], start=1):
        output = feed(front, "r", [token], num_cached_tokens=3)
        assert output.outputs[0].text == tokenizer().decode(ids[:count])
        assert not output.finished
    output = feed(front, "r", ids[-1:], finish_reason="length")
    [completion] = output.outputs
    assert (completion.text, completion.token_ids) == (" beginning God", ids)
    assert (completion.finish_reason, completion.stop_reason, completion.finished) == ("length", None, True)
    assert output.finished
    assert output.num_cached_tokens == 3
    assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)
    metrics = output.metrics
    assert metrics is not None
    assert (metrics.arrival_time, metrics.first_token_time, metrics.num_generated_tokens) == (0, 1, len(ids))
    assert (metrics.last_token_time, metrics.finished_time) == (len(ids), len(ids) + 1)
    assert front.num_unfinished == 0
    assert front.process(TokenOutput("r", [1])) is None
    assert front.take_aborts() == []


def test_eos_is_kept_as_an_id_and_left_out_of_the_text() -> None:
    front = processor()
    add(front, "In")
    output = feed(front, "r", [*ids_of(" a"), 1], finish_reason="stop")
    assert output.outputs[0].token_ids == [*ids_of(" a"), 1]
    assert output.outputs[0].text == " a"


def test_a_stop_string_ends_the_request_and_names_what_to_abort() -> None:
    front = processor()
    add(front, "In", stop=["ning G"])
    texts, output = [], None
    ids = ids_of(" the beginning God created")
    for token in ids:
        output = front.process(TokenOutput("r", [token]))
        if output is None:
            break
        texts.append(output.outputs[0].text)
        last = output
    assert last.finished
    assert last.outputs[0].finish_reason == "stop"
    assert last.outputs[0].stop_reason == "ning G"
    assert texts[-1] == " the begin"
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert front.take_aborts() == ["r"]
    assert front.take_aborts() == []
    assert tokenizer().decode(last.outputs[0].token_ids).startswith(" the beginning G")


def test_a_stop_string_with_the_last_token_needs_no_abort() -> None:
    front = processor()
    add(front, "In", stop=["ab"])
    output = feed(front, "r", ids_of("xab"), finish_reason="length")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "ab")
    assert output.outputs[0].text == "x"
    assert front.take_aborts() == []


def test_tokens_behind_a_stop_string_are_dropped_with_their_logprobs() -> None:
    front = processor()
    add(front, "In", stop=["b"], logprobs=0)
    ids = [ids_of(char)[0] for char in "abcd"]
    output = feed(front, "r", ids, logprobs=[TokenLogprobs([i], [-1.0], 1) for i in ids])
    assert output.outputs[0].token_ids == ids[:2]
    assert len(output.outputs[0].logprobs or []) == 2
    assert output.outputs[0].cumulative_logprob == -2.0


def test_n_completions_come_back_in_order() -> None:
    front = processor()
    requests = front.add("r", "In", SamplingParams(n=3, seed=7, prompt_logprobs=0, max_tokens=9))
    assert [request.request_id for request in requests] == ["0_r", "1_r", "2_r"]
    assert [request.params.seed for request in requests] == [7, 8, 9]
    assert [request.params.n for request in requests] == [1, 1, 1]
    assert [request.params.prompt_logprobs for request in requests] == [0, None, None]
    for engine_id, text in (("2_r", "c"), ("0_r", "a"), ("1_r", "b")):
        output = feed(front, engine_id, ids_of(text), finish_reason="length")
    assert [(completion.index, completion.text) for completion in output.outputs] == [(0, "a"), (1, "b"), (2, "c")]
    assert output.finished
    assert front.num_unfinished == 0


def test_seeds_repeat_with_the_engines_seed() -> None:
    def seeds(seed: int | None) -> list[int | None]:
        front = processor(seed=seed)
        return [r.params.seed for name in "ab" for r in front.add(name, "x", SamplingParams(n=2))]

    first = seeds(0)
    assert first == seeds(0) != seeds(1)
    assert len(set(first)) == 4
    assert first[1] == (first[0] or 0) + 1
    assert seeds(None) != seeds(None)


def test_defaults_and_eos_of_the_checkpoint() -> None:
    config = GenerationConfig.from_dict({"temperature": 0.6, "max_new_tokens": 5, "eos_token_id": [9, 8]})
    front = processor(generation_config=config, eos_token_ids=(8, 7))
    [request] = front.add("r", "In")
    assert (request.params.temperature, request.max_tokens) == (0.6, 5)
    assert request.eos_token_ids == [9, 8, 7, 1]
    assert add(front, "In", "own", ignore_eos=True).eos_token_ids == []
    assert add(front, "In", "none").params.temperature == 1.0


def test_max_tokens_is_resolved() -> None:
    front = processor()
    numbers = itertools.count()
    for length, asked, resolved in ((4, 16, 16), (60, 16, 4), (4, None, 60), (63, 16, 1)):
        assert add(front, [5] * length, f"r{next(numbers)}", max_tokens=asked).max_tokens == resolved


def test_what_cannot_be_served_is_refused_in_one_line() -> None:
    front = processor()
    add(front, "In", "taken")
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("", {}, "at least one token"),
        ([], {}, "at least one token"),
        ([512], {}, "below 512"),
        ("In", {"stop_token_ids": [512]}, "stop_token_ids"),
        ("In", {"allowed_token_ids": [3, 512]}, "allowed_token_ids"),
        ("In", {"logit_bias": {512: 1.0}}, "logit_bias"),
    ]
    for prompt, params, message in cases:
        with pytest.raises(ConfigError, match=message) as caught:
            add(front, prompt, **params)
        assert "\n" not in str(caught.value)
    with pytest.raises(CapacityError, match="64 tokens"):
        add(front, [5] * 64)
    with pytest.raises(ConfigError, match="in use"):
        add(front, "In", "taken")
    assert front.num_unfinished == 1


def test_a_childs_id_must_not_hide_another_request() -> None:
    front = processor()
    add(front, "In", "0_r")
    with pytest.raises(ConfigError, match="in use"):
        front.add("r", "In", SamplingParams(n=2))
    assert front.num_unfinished == 1


def test_bad_words_with_and_without_a_space() -> None:
    front = processor()
    words = add(front, "In", bad_words=["God", " the"]).bad_words_ids
    assert ids_of("God") in words
    assert ids_of("the") in words
    assert all(tokenizer().decode(ids).strip() in ("God", "the") for ids in words)
    covered = [ids for ids in (ids_of(" God"), ids_of(" the")) if ids not in words]
    assert all(any(ids[-len(word) :] == word for word in words) for ids in covered)


def test_logprobs_have_vllms_shape() -> None:
    front = processor()
    add(front, [3, 4, 5], logprobs=2, prompt_logprobs=1)
    token, best, second = ids_of("a")[0], ids_of("b")[0], ids_of("c")[0]
    output = feed(
        front,
        "r",
        [token],
        logprobs=[TokenLogprobs([token, best, second], [-3.0, -0.5, -1.0], 7)],
        prompt_logprobs=[None, TokenLogprobs([4, 4], [-0.1, -0.1], 1), TokenLogprobs([5, 6], [-2.0, -0.2], 3)],
    )
    [completion] = output.outputs
    assert completion.logprobs == [
        {token: Logprob(-3.0, 7, "a"), best: Logprob(-0.5, 1, "b"), second: Logprob(-1.0, 2, "c")}
    ]
    assert list(completion.logprobs[0]) == [token, best, second]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1] == {4: Logprob(-0.1, 1, tokenizer().decode_one(4))}
    assert list(output.prompt_logprobs[2] or {}) == [5, 6]
    feed(front, "r", [best], logprobs=[TokenLogprobs([best, best, token], [-0.5, -0.5, -1.0], 1)])
    assert completion.cumulative_logprob == -3.5
    assert len(completion.logprobs) == 2


def test_abort_ends_open_completions() -> None:
    front = processor()
    front.add("r", "In", SamplingParams(n=2, max_tokens=9))
    output = feed(front, "1_r", ids_of("b"), finish_reason="length")
    feed(front, "0_r", ids_of("a"))
    assert front.abort("r") == ["0_r"]
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "length"]
    assert output.finished
    assert front.process(TokenOutput("0_r", [1])) is None
    assert front.abort("r") == []
    assert front.num_unfinished == 0


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    front = processor(tokenizer=None)
    request = add(front, [5, 6], logprobs=0)
    assert request.eos_token_ids == []
    output = feed(front, "r", [7], logprobs=[TokenLogprobs([7], [-1.0], 1)], finish_reason="stop")
    assert (output.prompt, output.outputs[0].text, output.outputs[0].token_ids) == (None, "", [7])
    assert output.outputs[0].logprobs == [{7: Logprob(-1.0, 1, None)}]
    for prompt, params in (("In", {}), ([5], {"stop": "x"}), ([5], {"bad_words": ["x"]})):
        with pytest.raises(ConfigError, match="skip_tokenizer_init"):
            add(front, prompt, **params)


def test_detokenize_off_leaves_the_text_empty() -> None:
    front = processor()
    add(front, "In", detokenize=False)
    assert feed(front, "r", ids_of("a"), finish_reason="length").outputs[0].text == ""


@pytest.mark.parametrize("params", [{"temperature": 0.5}, 3, "greedy", SamplingParams])
def test_other_things_than_sampling_params_are_refused(params: Any) -> None:
    front = processor()
    with pytest.raises(ConfigError, match="sampling_params"):
        front.add("r", [1], params)
    assert front.num_unfinished == 0


def test_parameters_changed_after_construction_are_checked_and_copied() -> None:
    front, params = processor(), SamplingParams(logprobs=1)
    params.stop = "x"
    [request] = front.add("a", [1], params)
    assert request.params.stop == ["x"]
    params.logprobs = None
    output = feed(front, "a", [5], logprobs=[TokenLogprobs([5], [-1.0], 1)])
    assert output.outputs[0].logprobs is not None
    params.temperature = float("inf")
    with pytest.raises(ConfigError, match="temperature"):
        front.add("b", [1], params)
