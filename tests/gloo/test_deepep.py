"""DeepEP's transports over a stand-in for the library on CPU ranks: against one rank that has all experts, against
transformers, and what they refuse to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_deep_ep
import pytest
import torch
from answers import assert_right, greedy, prompts, settled_stats
from counters import assert_add_up
from one_rank import CASES, check_equals_one_rank
from patched_ranks import patched_ranks
from ranks import RankEnv, RankPool
from test_transports import CPU, HIDDEN, Case, finalized, make_experts, make_tokens, prepared

from hocket.config import resolve
from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.errors import OverlapError
from hocket.llm import LLM
from hocket.moe.experts.fp8 import Fp8Experts
from hocket.moe.transport.base import StepSizes, Transport
from hocket.moe.transport.registry import build_transport
from hocket.trace.spans import Stage
from hocket.ubatch.transfer import Running

DEEPEP = ("deepep_high_throughput", "deepep_low_latency")


def opened(env: RankEnv, case: Case, name: str) -> Transport:
    fake_deep_ep.install()
    num_ranks = len(case.tokens)
    transport = build_transport(name, case.placement, rank=env.rank, group=env.groups[num_ranks], device=CPU)
    sizes = StepSizes(max_tokens=16, hidden_size=HIDDEN, top_k=case.top_k, dtype=case.dtype, num_local_ranks=num_ranks)
    transport.open(sizes)
    return transport


def check_case(env: RankEnv, case: Case, name: str) -> None:
    check_equals_one_rank(env, case, opened(env, case, name))


@pytest.mark.parametrize("name", DEEPEP)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_dispatch_equals_one_rank(pool: RankPool, case: Case, name: str) -> None:
    pool.run(check_case, case, name, num_ranks=len(case.tokens))


def under_way(env: RankEnv, name: str) -> None:
    """Three calls at once, results of each for itself."""
    cases = [Case((3, 5), (1, 0), 6, 2, seed=1), Case((4, 0), (0, 2), 6, 2, seed=1), Case((2, 2), (0, 0), 6, 2, seed=1)]
    transport = opened(env, cases[0], name)
    experts, everything = make_experts(cases[0], "reference", env.rank), make_experts(cases[0], "reference")
    inputs = [make_tokens(case, env.rank) for case in cases]
    sent = [prepared(transport, *i, c.layout(env.rank)) for i, c in zip(inputs, cases, strict=True)]
    results = [one.through(experts) for one in sent]
    for index in (1, 2, 0):
        out = finalized(transport, results[index], sent[index].handle)
        torch.testing.assert_close(out, everything(*inputs[index]), atol=1e-5, rtol=1e-5)
    transport.close()


@pytest.mark.parametrize("name", DEEPEP)
def test_three_calls_may_be_under_way(pool: RankPool, name: str) -> None:
    pool.run(under_way, name, num_ranks=2)


def send_twice(env: RankEnv) -> str:
    case = Case((3, 5), (1, 0), 6, 2)
    transport = opened(env, case, "deepep_low_latency")
    tokens, layout = make_tokens(case, env.rank), case.layout(env.rank)
    first = transport.prepare(*tokens, layout)
    first.send()
    with pytest.raises(OverlapError) as caught:
        transport.prepare(*tokens, layout).send()
    assert first.receive is not None
    first.receive()
    transport.prepare(*tokens, layout).send()
    transport.close()
    return str(caught.value)


def test_a_send_before_the_receive_in_front_of_it_is_refused(pool: RankPool) -> None:
    expected = "a dispatch would be sent before the dispatch in front of it is received"
    assert pool.run(send_twice, num_ranks=2) == [expected] * 2


def share(env: RankEnv) -> tuple[list[int], int]:
    """SM counts while limited, and the library's own number, which is someone else's too."""
    case = Case((3, 5), (1, 0), 6, 2)
    transport = opened(env, case, "deepep_high_throughput")
    found = []
    assert transport.max_sms is not None
    for asked in (transport.max_sms + 10, 13, 1):
        undo = transport.limit_sms(asked)
        found.append(transport._opened.dispatch.num_sms)  # type: ignore[attr-defined]
        sent = prepared(transport, *make_tokens(case, env.rank), case.layout(env.rank))
        undo()
        found.append(transport._opened.combine.num_sms)  # type: ignore[attr-defined]
        finalized(transport, torch.zeros_like(sent.x), sent.handle)  # with as many as its dispatch had
    transport.close()
    return found, fake_deep_ep.Buffer.num_sms


def test_sms_are_even_never_more_than_there_is_room_for_and_brought_back(pool: RankPool) -> None:
    assert pool.run(share, num_ranks=2) == [([24, 24, 12, 24, 2, 24], 20)] * 2


@pytest.fixture(scope="module")
def fake_ranks() -> Iterator[RankGroup]:
    with patched_ranks(2, "fake_deep_ep:install") as group:
        yield group


@pytest.mark.parametrize(
    ("name", "executor", "num_ubatches"),
    [
        ("deepep_high_throughput", "greenlet", 2),
        ("deepep_high_throughput", "thread", 3),
        ("deepep_low_latency", "thread", 2),
        ("deepep_low_latency", "greenlet", 3),
    ],
)
def test_answers_with_overlap_are_those_of_transformers(
    fake_ranks: RankGroup,
    checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    executor: str,
    num_ubatches: int,
) -> None:
    """Prefills, decodes and both; the library's buffers are made anew for each engine."""
    monkeypatch.setattr(resolve, "GPU_TRANSPORTS", ())
    path = checkpoints("v2")
    least = {"dbo_decode_token_threshold": num_ubatches, "dbo_prefill_token_threshold": num_ubatches}
    options: dict[str, Any] = {
        "model": str(path),
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "all2all_backend": name,
        "ubatch_executor": executor,
        "ubatch_size": num_ubatches,
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 16,
        "step_timeout": 20.0,
        **least,
    }
    with LLM.from_options(Options.from_dict(options), group=fake_ranks) as llm:
        results = llm.generate(prompts(path, (1, 7, 33, 20, 9, 4, 12, 5), 6), greedy(6, logprobs=2), use_tqdm=False)
        assert_right(path, results)
        assert assert_add_up(settled_stats(llm), num_ubatches)["split"] >= 5


def rows_in_fp8(env: RankEnv) -> None:
    """Experts in fp8 get rows that were quantised before they travelled, and give what they give for rows in bf16."""
    fake_deep_ep.install()
    case = Case((5, 9), (1, 0), 7, 3, dtype=torch.bfloat16)
    placement, hidden = case.placement, 512
    transport = build_transport("deepep_low_latency", placement, rank=env.rank, group=env.groups[2], device=CPU)
    transport.open(StepSizes(max_tokens=16, hidden_size=hidden, top_k=3, dtype=torch.bfloat16, num_local_ranks=2))
    ids = placement.experts_of(env.rank)
    local_id_of = torch.tensor(placement.local_id_of(env.rank))
    experts = Fp8Experts(len(ids), hidden, 128, num_experts=7, local_id_of=local_id_of, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(env.rank)
    for parameter in experts.parameters():
        parameter.copy_(torch.rand(parameter.shape, generator=generator) * 0.1)
    _, topk_ids, weights = make_tokens(case, env.rank)
    x = torch.randn(len(topk_ids), hidden, generator=generator).bfloat16()
    found = []
    for is_fp8 in (False, True):
        if is_fp8:
            transport.send_fp8()
        dispatch = transport.prepare(x, topk_ids, weights, case.layout(env.rank))
        sent = Running(dispatch, Stage.DISPATCH).finish(Stage.EXPERTS)
        assert sent.x.dtype == (torch.float8_e4m3fn if is_fp8 else torch.bfloat16)
        found.append((finalized(transport, sent.through(experts), sent.handle), dispatch.num_bytes()))
    assert torch.equal(finalized(transport, sent.nothing(), sent.handle), torch.zeros_like(x))  # of a rank that failed
    (plain, plain_bytes), (quantised, fewer_bytes) = found
    assert plain.abs().max() > 0
    torch.testing.assert_close(quantised, plain, atol=0.02 * float(plain.abs().max()), rtol=0.02)
    assert fewer_bytes * (512 * 2 + 16) == plain_bytes * (512 + 4 * 4 + 16)
    transport.close()


def test_rows_may_travel_in_fp8(pool: RankPool) -> None:
    pool.run(rows_in_fp8, num_ranks=2)
