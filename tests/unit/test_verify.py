"""What a verification makes of answers, counters and hidden states, without ranks."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from hocket.channel.messages import StateRow, States
from hocket.config.options import Options
from hocket.errors import ConfigError
from hocket.verify.compare import Answer, Rules, compare
from hocket.verify.configurations import configurations
from hocket.verify.show import bisected
from hocket.verify.split import check_splits, not_exercised
from hocket.verify.states import LayerStates, StateDifference, bisect
from hocket.verify.workload import Workload

RULES = Rules.of("float32", exact=False)
EXACT = Rules.of("float32", exact=True)
RANKS = Options(data_parallel_size=2, enable_expert_parallel=True)
WORK = Workload(num_prompts=12, prompt_len=96, output_len=8)


def answer(*tokens: int, likely: float = -0.5, second: int = 99, behind: float = 1.0) -> Answer:
    """Each token with `likely`, and one other that is `behind`."""
    return Answer(tokens, [{token: likely, second: likely - behind} for token in tokens])


# -- answers --------------------------------------------------------------------------------------------------------


def test_equal_answers() -> None:
    found = compare([answer(1, 2), answer(3)], [answer(1, 2), answer(3)], EXACT)
    assert found.agrees
    assert (found.num_requests, found.num_same_requests, found.num_tokens, found.num_same_tokens) == (2, 2, 3, 3)
    assert found.largest_logprob_difference == 0


def test_another_token_is_the_first_difference_of_its_request() -> None:
    found = compare([answer(1, 2), answer(3, 4, 5)], [answer(1, 2), answer(3, 7, 5)], RULES)
    assert not found.agrees
    assert found.first is not None
    assert (found.first.request, found.first.token, found.first.found, found.first.expected) == (1, 1, 7, 4)
    assert found.first.logprobs == (-0.5, -0.5)
    assert (found.num_same_requests, found.num_same_tokens, found.num_tokens) == (1, 4, 5)
    # 7 is no likelier in the first run than its last token, 1 behind.
    assert found.largest_logprob_difference == found.first.logprob_difference == 1.0


@pytest.mark.parametrize(("change", "agrees"), [(0.9e-4, True), (1.1e-4, False), (math.nan, False)])
def test_log_probabilities_are_compared_with_the_tolerance(change: float, agrees: bool) -> None:
    found = compare([answer(1, 2)], [answer(1, 2, likely=-0.5 + change)], RULES)
    assert found.agrees == agrees
    assert found.num_same_tokens == 2
    assert not compare([answer(1, 2)], [answer(1, 2, likely=-0.5 + change)], EXACT).agrees


def test_behind_another_token_nothing_is_said_of_log_probabilities() -> None:
    before, after = answer(1, 2, 3), answer(1, 9, 3)
    after = Answer(after.token_ids, [*before.logprobs[:2], {3: -7.0, 99: -8.0}])
    assert compare([before], [after], RULES).largest_logprob_difference == 0


@pytest.mark.parametrize(("behind", "is_tie"), [(1.9e-4, True), (2.1e-4, False)])
def test_ties_may_go_either_way_and_end_the_comparison(behind: float, is_tie: bool) -> None:
    before = answer(1, 2, 5, second=7, behind=behind)
    after = Answer((1, 7, 8), [before.logprobs[0], {7: -0.5 - behind / 2, 2: -0.5 - behind / 2 - 1e-9}, {8: -3.0}])
    found = compare([before], [after], RULES)
    assert found.agrees == is_tie
    if is_tie:
        assert (found.num_ties, found.num_tokens, found.num_same_tokens) == (1, 1, 1)
        assert found.largest_logprob_difference == pytest.approx(behind / 2, abs=1e-8)
    assert not compare([before], [after], EXACT).agrees


def test_a_tie_in_one_run_alone_is_none() -> None:
    before = Answer((1,), [{1: -0.5, 2: -0.50001}])
    after = Answer((2,), [{2: -0.4, 1: -2.0}])
    assert not compare([before], [after], RULES).agrees


def test_answers_of_other_lengths_differ() -> None:
    found = compare([answer(1, 2)], [answer(1)], RULES)
    assert found.first is not None
    assert (found.first.token, found.first.found, found.first.expected) == (1, None, 2)
    assert found.first.logprobs == (None, -0.5)


def test_exact_demands_the_same_tokens_in_the_lists_too() -> None:
    before, after = Answer((1,), [{1: -0.5, 2: -1.0}]), Answer((1,), [{1: -0.5, 3: -1.0}])
    assert compare([before], [after], RULES).agrees
    assert not compare([before], [after], EXACT).agrees


def test_tolerances_beside_deterministic_are_refused() -> None:
    assert Rules.of("float32", exact=False, logprob=0.5, tie=0.25) == replace(RULES, logprob=0.5, tie=0.25)
    assert Rules.of("float32", exact=False, logprob=0.5) == replace(RULES, logprob=0.5, tie=1.0)
    with pytest.raises(ConfigError, match="tie_tolerance"):
        Rules.of("float32", exact=True, tie=0.25)


HALF = Rules.of("bfloat16", exact=False)


def moved(differences: list[float]) -> list[Answer]:
    """A token each, as much less likely as `differences` say than in `answer(1)`."""
    return [answer(1, likely=-0.5 - one) for one in differences]


def test_what_the_dtype_alone_changes_is_twice_what_nine_of_ten_tokens_do() -> None:
    noise = compare(moved([0.0] * 20), moved([0.01 * i for i in range(20)]), HALF)
    assert noise.usual_difference == pytest.approx(0.17)
    assert HALF.measured(noise.usual_difference, "bfloat16").usual == pytest.approx(0.34)
    assert HALF.measured(0.0, "bfloat16").usual == 8 / 128, "by chance the sums may have had the same order"
    assert HALF.measured(0.0, "float16").usual == 8 / 1024


@pytest.mark.parametrize(("num_moved", "num_tokens", "drifts"), [(4, 20, False), (5, 20, True), (19, 19, False)])
def test_many_tokens_that_are_a_little_off_are_too_many(num_moved: int, num_tokens: int, drifts: bool) -> None:
    """None is off by as much as one token may be; where there are few tokens nothing can be said."""
    rules = HALF.measured(0.05, "bfloat16")
    differences = [0.11] * num_moved + [0.09] * (num_tokens - num_moved)
    found = compare(moved([0.0] * num_tokens), moved(differences), rules)
    assert found.first is None
    assert (found.num_unusual, found.num_compared) == (num_moved, num_tokens)
    assert (found.drifts, found.agrees) == (drifts, not drifts)
    assert compare(moved([0.0] * num_tokens), moved(differences), HALF).agrees, "only once it was measured"


# -- splits ---------------------------------------------------------------------------------------------------------


def counters(reasons: dict[str, dict[str, int]], cuts: dict[str, int]) -> dict[str, Any]:
    return {"overlap": {"reasons": reasons, "ubatch_tokens": cuts}}


SPLIT = {"prefill": {"split": 1}, "mixed": {"split": 2, "prefix_hazard": 1}, "decode": {"split": 3}}


def test_every_kind_of_step_must_have_been_split() -> None:
    good = check_splits([counters({**SPLIT, "idle": {"below_threshold": 9}}, {"2+2": 6})] * 2, 2)
    assert good.problem is None
    assert (good.num_split, good.num_steps) == (12, 14)
    assert good.reasons["mixed"] == {"prefix_hazard": 2}
    bad = check_splits([counters(SPLIT | {"decode": {"below_threshold": 4, "disabled": 5}}, {"2+2": 3})], 2)
    assert bad.problem == (
        "no decode step of 9 was split (disabled 5, below_threshold 4): ask for more prompts, or longer outputs"
    )


def test_kinds_of_steps_that_there_were_not_are_no_problem_but_said() -> None:
    few = check_splits([counters({"prefill": {"split": 1}}, {"2+2": 1})], 2)
    assert few.problem is None
    assert not_exercised(few, longest_prompt=9, step_tokens=9) == [
        "mixed steps",
        "decode steps",
        "chunked prefill (the longest prompt has 9 tokens, a step 9: see --max-num-batched-tokens)",
    ]
    assert not_exercised(few, longest_prompt=10, step_tokens=9) == ["mixed steps", "decode steps"]


def test_other_ubatches_than_asked_for_are_a_problem() -> None:
    assert "split into 3 parts but as 2+2" in str(check_splits([counters(SPLIT, {"2+2": 6})], 3).problem)
    assert "6 steps were split although" in str(check_splits([counters(SPLIT, {"2+2": 6})], 1).problem)
    assert check_splits([counters({"prefill": {"disabled": 1}}, {})], 1).problem is None
    assert check_splits([counters({}, {})], 2).problem == "no step was run"


# -- hidden states --------------------------------------------------------------------------------------------------

HIDDEN = 4


def layer(values: np.ndarray, ubatches: int = 1) -> LayerStates:
    """values [2, R, D]; the rows are the positions of one request, the ubatches equally large."""
    count = values.shape[1]
    rows = [StateRow("0", i, 0, "prefill", i * ubatches // count, ubatches) for i in range(count)]
    raw = values.astype(np.float32).tobytes()
    return LayerStates.of([States(rank=0, layer=0, rows=rows, hidden_size=HIDDEN, values=raw)])


def ones() -> np.ndarray:
    return np.ones((2, 8, HIDDEN))


def test_the_first_layer_its_place_and_its_ubatch_are_named() -> None:
    attention, experts = ones(), ones()
    attention[0, 6] = 1.1
    attention[1, 2] = 5
    experts[1, 5:7] = 1.1
    expected = [layer(ones())] * 3
    found = bisect(expected, iter([layer(ones(), 2), layer(experts, 2), layer(attention, 2)]), 0.01)
    assert found.first is not None
    assert (found.num_layers, found.num_rows) == (2, 8)
    first = found.first
    assert (first.layer, first.place, first.row.position, first.row.ubatch) == (1, "MLP or experts", 5, 1)
    assert first.difference == pytest.approx(0.1)
    assert (first.num_differing, first.ubatches) == (2, {1: 2})
    found = bisect(expected, iter([layer(attention, 2)]), 0.01)
    assert found.first is not None
    assert (found.first.place, found.first.row.position) == ("attention", 6)


def test_layers_behind_the_first_that_differs_are_not_asked_for() -> None:
    asked = []

    def layers() -> Any:
        for number in range(3):
            asked.append(number)
            yield layer(ones() * (1 if number == 0 else 2))

    bisect([layer(ones())] * 3, layers(), 0.01)
    assert asked == [0, 1]


def test_what_is_no_number_differs_and_a_few_strays_may_where_allowed() -> None:
    lost = ones()
    lost[1, 3] = np.nan
    found = bisect([layer(ones())], iter([layer(lost)]), 0.01)
    assert found.first is not None
    assert found.first.difference == math.inf
    stray = bisect([layer(ones())], iter([layer(lost)]), 0.01, stray=1 / 8)
    assert (stray.first, stray.num_strays) == (None, 1)
    assert bisect([layer(ones())], iter([layer(lost)]), 0.01, stray=0.1).first is not None


def test_tokens_of_one_run_alone_and_second_times_are_left_out() -> None:
    once, again = layer(ones()), layer(ones())
    values = again.values.copy()
    values[:, 7] = 9
    again = LayerStates([*again.rows[:7], again.rows[0]], values)
    found = bisect([once], iter([again]), 0.0)
    assert (found.first, found.num_rows) == (None, 7)


def test_one_token_alone_may_be_a_near_tie_and_that_is_said() -> None:
    row = StateRow("3", 17, 0, "prefill", 1, 2)
    first = StateDifference(2, "MLP or experts", row, 0.5, 80, 1, {1: 1})
    plain = {"num_layers": 3, "num_rows": 80, "largest": 0.5, "num_strays": 0, "first": first.as_dict()}
    line = bisected(plain, 1e-4)
    assert line.startswith(
        "first to differ: layer 2, MLP or experts, ubatch 1 of 2 (request 3, position 17, prefill step"
    )
    assert "near tie between two experts" in line
    assert "near tie" not in bisected(plain, 0.0)
    two = replace(first, num_differing=2)
    assert "near tie" not in bisected(plain | {"first": two.as_dict()}, 1e-4)


# -- what is run ----------------------------------------------------------------------------------------------------


def test_configurations_cover_transports_ubatches_and_a_restart() -> None:
    made, skipped = configurations(RANKS, WORK)
    assert skipped == []
    assert [one.name for one in made] == [
        "overlap off, allgather_reducescatter",
        "2 ubatches, allgather_reducescatter",
        "3 ubatches, allgather_reducescatter",
        "overlap off, torch",
        "2 ubatches, torch",
        "3 ubatches, torch",
        "overlap off, allgather_reducescatter, restarted",
        "2 ubatches, allgather_reducescatter, restarted",
    ]
    for one in made:
        assert one.options.max_num_batched_tokens == 64 < WORK.prompt_len
        assert not one.options.enable_dbo
        if one.num_ubatches > 1:
            assert one.options.dbo_decode_token_threshold == one.options.dbo_prefill_token_threshold == one.num_ubatches


@pytest.mark.parametrize(("dtype", "expected"), [("float32", 0), ("bfloat16", 1), ("float16", 1)])
def test_in_half_precision_the_second_run_has_the_prompts_reversed(dtype: str, expected: int) -> None:
    made, _ = configurations(replace(RANKS, dtype=dtype), WORK)
    assert [i for i, one in enumerate(made) if one.is_reversed] == [1] * expected
    assert made[expected].options == made[0].options
    exact, _ = configurations(replace(RANKS, dtype=dtype, deterministic=True), WORK)
    assert not any(one.is_reversed for one in exact)


def test_options_that_are_given_are_kept() -> None:
    options = replace(RANKS, all2all_backend="torch", ubatch_size=4, max_num_batched_tokens=2048, enable_dbo=False)
    made, _ = configurations(options, WORK)
    assert [(one.num_ubatches, one.transport) for one in made] == [(n, "torch") for n in (1, 2, 3, 4, 1, 2)]
    assert {one.options.max_num_batched_tokens for one in made} == {2048}
    whole, _ = configurations(replace(RANKS, enable_chunked_prefill=False), WORK)
    assert whole[0].options.max_num_batched_tokens is None


def test_what_cannot_be_compared_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="enable_expert_parallel"):
        configurations(Options(data_parallel_size=2), WORK)
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "2")
    with pytest.raises(ConfigError, match="HOCKET_FORCE_SPLIT"):
        configurations(RANKS, WORK)


def test_prompts_differ_in_length_and_share_a_beginning_on_a_rank() -> None:
    prompts = [one["prompt_token_ids"] for one in WORK.prompts(2, 1000, seed=3)]
    lengths = [len(ids) for ids in prompts]
    assert max(lengths) == 96
    assert len(set(lengths[::2])) > 3
    assert lengths[::2] != lengths[1::2]
    for rank in (0, 1):
        writer, reader = prompts[rank], prompts[rank + 2]
        assert writer[:37] == reader[:37]
        assert writer != reader
    assert [one["prompt_token_ids"] for one in WORK.prompts(2, 1000, seed=3)] == prompts
    assert [one["prompt_token_ids"] for one in WORK.prompts(2, 1000, seed=4)] != prompts


def test_prompts_of_a_file(tmp_path: Any) -> None:
    file = tmp_path / "prompts"
    file.write_text("In the beginning\n\nThe lady was\n")
    assert replace(WORK, prompts_file=str(file)).prompts(2, 1000, seed=3) == ["In the beginning", "The lady was"]


def test_the_table_fits() -> None:
    from hocket.verify.show import show

    row = {
        "name": "2 ubatches, allgather_reducescatter, restarted",
        "comparison": asdict(compare([answer(1, 2)], [answer(1, 3)], RULES)),
        "splits": asdict(check_splits([counters(SPLIT | {"decode": {"disabled": 4}}, {"2+2": 3})], 2)),
        "bisection": None,
        "problem": "other answers",
    }
    work = asdict(WORK) | {"lengths": [96, 19]}
    report = {"model": "tiny", "dtype": "float32", "num_ranks": 2, "step_tokens": 64, "rules": asdict(RULES)}
    report |= {"workload": work, "rows": [row, row], "problems": ["a", "b"], "not_exercised": [], "skipped": ["x"]}
    out = io.StringIO()
    show(report, Console(file=out, width=120))
    text = out.getvalue()
    assert "2 ubatches, allgather_reducescatter, restarted" in text.splitlines()[7], "not broken"
    for what in (
        "request 0, token 1: 3 (-0.5) instead of 2 (-0.5)",
        "not a verification either: no decode step",
        "✗ 2",
    ):
        assert what in text
