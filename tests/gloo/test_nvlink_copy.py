"""`nvlink_copy` over shared memory of CPU ranks: against one rank that has all experts, against transformers with
overlap, and what it refuses to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_peer_memory
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
from hocket.errors import CapacityError, OverlapError
from hocket.llm import LLM
from hocket.moe.transport.base import StepSizes, Transport
from hocket.moe.transport.registry import build_transport


def opened(env: RankEnv, case: Case, num_ubatches: int = 2) -> Transport:
    fake_peer_memory.install()
    num_ranks = len(case.tokens)
    transport = build_transport("nvlink_copy", case.placement, rank=env.rank, group=env.groups[num_ranks], device=CPU)
    sizes = StepSizes(
        max_tokens=16,
        hidden_size=HIDDEN,
        top_k=case.top_k,
        dtype=case.dtype,
        num_local_ranks=num_ranks,
        num_ubatches=num_ubatches,
    )
    transport.open(sizes)
    return transport


def check_case(env: RankEnv, case: Case) -> None:
    check_equals_one_rank(env, case, opened(env, case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_dispatch_equals_one_rank(pool: RankPool, case: Case) -> None:
    pool.run(check_case, case, num_ranks=len(case.tokens))


def under_way(env: RankEnv, num_rounds: int) -> None:
    """Three calls at once, as three ubatches make them, results of each for itself; slots are used again and again."""
    cases = [Case((3, 5), (1, 0), 6, 2, seed=1), Case((4, 0), (0, 2), 6, 2, seed=1), Case((2, 2), (0, 0), 6, 2, seed=1)]
    transport = opened(env, cases[0], num_ubatches=3)
    experts, everything = make_experts(cases[0], "reference", env.rank), make_experts(cases[0], "reference")
    inputs = [make_tokens(case, env.rank) for case in cases]
    for _ in range(num_rounds):
        sent = [prepared(transport, *i, c.layout(env.rank)) for i, c in zip(inputs, cases, strict=True)]
        results = [one.through(experts) for one in sent]
        for index in range(3):
            out = finalized(transport, results[index], sent[index].handle)
            torch.testing.assert_close(out, everything(*inputs[index]), atol=1e-5, rtol=1e-5)
    transport.close()


def test_as_many_calls_as_ubatches_may_be_under_way(pool: RankPool) -> None:
    pool.run(under_way, 5, num_ranks=2)


def one_too_many(env: RankEnv) -> None:
    case = Case((3, 5), (1, 0), 6, 2)
    transport = opened(env, case, num_ubatches=1)
    tokens, layout = make_tokens(case, env.rank), case.layout(env.rank)
    first = prepared(transport, *tokens, layout)
    with pytest.raises(OverlapError, match="more than 1 calls would be under way"):
        transport.prepare(*tokens, layout).send()
    finalized(transport, first.nothing(), first.handle)
    with pytest.raises(CapacityError, match="padded to 17, do not fit into 16"):
        transport.prepare(*tokens, Case((17, 5), (0, 0), 6, 2).layout(env.rank))
    transport.close()


def test_what_has_no_room_is_refused(pool: RankPool) -> None:
    pool.run(one_too_many, num_ranks=2)


def one_fails(env: RankEnv) -> None:
    """One rank packs no rows, and takes part nevertheless, as a step does that fails there."""
    case = Case((3, 5), (1, 0), 6, 2)
    transport = opened(env, case)
    (x, ids, weights), layout = make_tokens(case, env.rank), case.layout(env.rank)
    if env.rank == 0:
        with pytest.raises(RuntimeError):
            transport.prepare(x, ids, weights[:, :0], layout)
    for _ in range(3):
        sent = prepared(transport, x, ids, weights, layout)
        out = finalized(transport, sent.through(make_experts(case, "reference", env.rank)), sent.handle)
        torch.testing.assert_close(out, make_experts(case, "reference")(x, ids, weights), atol=1e-5, rtol=1e-5)
    transport.close()


def test_ranks_keep_the_same_slots_when_one_fails(pool: RankPool) -> None:
    pool.run(one_fails, num_ranks=2)


@pytest.fixture(scope="module")
def memory_ranks() -> Iterator[RankGroup]:
    with patched_ranks(2, "fake_peer_memory:install") as group:
        yield group


@pytest.mark.parametrize(("executor", "num_ubatches"), [("greenlet", 2), ("thread", 3)])
def test_answers_with_overlap_are_those_of_transformers(
    memory_ranks: RankGroup,
    checkpoints: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
    num_ubatches: int,
) -> None:
    """Prefills, decodes and both; the memory is opened anew for each engine."""
    monkeypatch.setattr(resolve, "GPU_TRANSPORTS", ())
    path = checkpoints("v2")
    least = {"dbo_decode_token_threshold": num_ubatches, "dbo_prefill_token_threshold": num_ubatches}
    options: dict[str, Any] = {
        "model": str(path),
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "all2all_backend": "nvlink_copy",
        "ubatch_executor": executor,
        "ubatch_size": num_ubatches,
        "skip_tokenizer_init": True,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 16,
        "step_timeout": 20.0,
        **least,
    }
    with LLM.from_options(Options.from_dict(options), group=memory_ranks) as llm:
        results = llm.generate(prompts(path, (1, 7, 33, 20, 9, 4, 12, 5), 6), greedy(6, logprobs=2), use_tqdm=False)
        assert_right(path, results)
        assert assert_add_up(settled_stats(llm), num_ubatches)["split"] >= 5
