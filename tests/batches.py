"""Batches made by hand or drawn at random, for the tests of vote, cuts and costs."""

from __future__ import annotations

from hypothesis import strategies as st

from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.batch import Batch, BatchBuilder

Part = tuple[int, int, int]
"""A request's prompt tokens, computed tokens, and tokens of the step."""


def batch_of(*parts: Part) -> Batch:
    builder = BatchBuilder(1_000_000)
    for i, (prompt, computed, num_tokens) in enumerate(parts):
        request = Request(
            EngineRequest(request_id=str(i), prompt_token_ids=[1] * prompt, params=SamplingParams(), max_tokens=4)
        )
        request.token_ids += [1] * max(0, computed + num_tokens - prompt)
        request.num_computed_tokens = computed
        builder.add(request, num_tokens, is_prefill=computed < prompt)
    return builder.build()


def _decodes(num_tokens: int) -> st.SearchStrategy[Part]:
    return st.tuples(st.integers(1, 9), st.integers(0, 40)).map(lambda p: (p[0], p[0] + p[1], num_tokens))


def _prefills() -> st.SearchStrategy[Part]:
    sizes = st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 5))
    return sizes.map(lambda s: (s[0] + s[1] + s[2], s[0], s[1]))


def batches(most: int = 8) -> st.SearchStrategy[Batch]:
    """Idle, decodes of one length (1 to 4 tokens), decodes of several, prefills, or decodes and then prefills."""
    uniform = st.integers(1, 4).flatmap(lambda q: st.lists(_decodes(q), max_size=most))
    uneven = st.lists(st.integers(1, 4).flatmap(_decodes), max_size=most)
    prefills = st.lists(_prefills(), max_size=most)
    mixed = st.tuples(uniform, prefills).map(lambda both: both[0] + both[1])
    return st.one_of(uniform, uniform, uneven, prefills, mixed).map(lambda parts: batch_of(*parts))
