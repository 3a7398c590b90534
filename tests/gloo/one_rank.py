"""What tests of transports over a stand-in for their GPU part share: cases on CPU ranks, and one rank that has all
experts to compare with."""

from __future__ import annotations

import torch
from ranks import RankEnv
from test_transports import Case, finalized, make_experts, make_tokens, prepared

from hocket.config.backends import CPU_EXPERTS
from hocket.moe.transport.base import Transport

CASES = (
    Case((5, 9), (0, 0), 8, 3),
    Case((0, 7, 4), (2, 0, 3), 7, 2, strategy="round_robin", seed=3),  # a rank without tokens, uneven experts
    Case((0, 0), (0, 0), 4, 2),
    Case((6, 3, 1), (0, 2, 0), 2, 2, seed=1),  # a rank without experts
    Case((8, 5), (1, 0), 8, 4, ids="one_rank", dtype=torch.bfloat16, seed=2),
    Case((3, 4), (2, 1), 8, 3, ids="dropped"),
)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def check_equals_one_rank(env: RankEnv, case: Case, transport: Transport) -> None:
    """With every backend; the transport is closed then."""
    x, ids, weights = make_tokens(case, env.rank)
    expected = make_experts(case, "reference")(x, ids, weights).float()
    for backend in CPU_EXPERTS:
        experts = make_experts(case, backend, env.rank)
        sent = prepared(transport, x, ids, weights, case.layout(env.rank))
        out = finalized(transport, sent.through(experts), sent.handle)
        assert out.dtype == case.dtype
        assert out.shape == x.shape
        limit = TOLERANCE[case.dtype]
        assert torch.allclose(out.float(), expected, atol=limit, rtol=limit), (backend, out - expected)
        assert not out[(ids < 0).all(dim=1)].any(), "a row without experts is zero"
        sent = prepared(transport, x, ids, weights, case.layout(env.rank))  # of a rank that failed
        assert torch.equal(finalized(transport, sent.nothing(), sent.handle), torch.zeros_like(out))
    transport.close()
