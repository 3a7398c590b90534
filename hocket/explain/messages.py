"""What a sparse layer sends for each token, asked of the transports themselves: one rank runs them among ranks that do
as it does (`Mirror`), on tokens that choose their experts at random. Knows no engine and starts none.

Legend: T tokens, D hidden, E experts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from hocket.config.backends import EP_TRANSPORTS, NCCL_TRANSPORTS
from hocket.config.engine import EngineConfig
from hocket.dist.collectives import Group, Mirror
from hocket.moe.base import TokenLayout
from hocket.moe.placement import ExpertPlacement
from hocket.moe.router import Router
from hocket.moe.transport.base import SentBytes, Tokens, most_received
from hocket.moe.transport.registry import build_transport, transport_class

SAMPLE_TOKENS = 256
"""As many choose experts where it depends on them how often a token travels. The mean is then within 2 to 3 %."""
_WIDTH = 64
"""Of the random vectors that the router sees: what it chooses does not depend on it."""


def messages(config: EngineConfig, may_be_fp8: bool = False) -> list[dict[str, Any]]:
    """{name, is_chosen, is_fp8, dispatch_bytes, combine_bytes, received_bytes, reserved_bytes} of each transport for
    such a device between so many ranks: what a rank sends to others for one of its tokens in one sparse layer, the room
    that it has for what comes (for each of its tokens, where all have as many) and what it keeps all the time for steps
    of so many. Empty for one rank, whose tokens do not move. may_be_fp8: all experts take rows in fp8; is_fp8: rows are
    dispatched so, with their scales.
    """
    parallel = config.parallel
    num_ranks = parallel.expert_parallel_size
    if num_ranks == 1:
        return []
    placement = ExpertPlacement(config.model.moe.num_experts, num_ranks, parallel.expert_placement_strategy)
    return [
        {"name": name, "is_chosen": name == parallel.all2all_backend, **_sent(name, config, placement, may_be_fp8)}
        for name in (NCCL_TRANSPORTS if config.device == "cpu" else EP_TRANSPORTS)
    ]


def _sent(name: str, config: EngineConfig, placement: ExpertPlacement, may_be_fp8: bool) -> dict[str, float]:
    """Bytes per token of rank 0, by the transport `name`."""
    num_tokens = 1 if transport_class(name).requires_padding else SAMPLE_TOKENS  # of fixed shapes each costs the same
    ids, weights = _choices(config, SAMPLE_TOKENS)
    hidden_size, dtype = config.model.hidden_size, getattr(torch, config.dtype)
    counted = transport_class(name).sent_bytes(
        Tokens(
            placement=placement,
            ids=ids,
            hidden_size=hidden_size,
            dtype=dtype,
            num_ubatches=config.overlap.num_ubatches,
            may_be_fp8=may_be_fp8,
        )
    )
    if counted is None:
        counted = _run(name, config, placement, ids[:num_tokens], weights[:num_tokens])
    else:
        num_tokens = SAMPLE_TOKENS
    return {
        "is_fp8": counted.is_fp8,
        "dispatch_bytes": counted.dispatch / num_tokens,
        "combine_bytes": counted.combine / num_tokens,
        "received_bytes": counted.received / num_tokens,
        "reserved_bytes": counted.reserved / num_tokens,
    }


def _run(name: str, config: EngineConfig, placement: ExpertPlacement, ids: Tensor, weights: Tensor) -> SentBytes:
    """By sending zeros."""
    cpu = torch.device("cpu")
    group = cast(Group, Mirror(placement.num_ranks))
    transport = build_transport(name, placement, rank=0, group=group, device=cpu)
    num_tokens, hidden_size, dtype = len(ids), config.model.hidden_size, getattr(torch, config.dtype)
    x = torch.zeros(num_tokens, hidden_size, dtype=dtype)
    dispatch = transport.prepare(x, ids, weights, TokenLayout.of(num_tokens, num_tokens, num_tokens, cpu))
    dispatch.send()
    came = dispatch.result()
    # A combine may be of another format off the host: `meta` stands for any other device, where nothing can be sent.
    where = cpu if config.device == "cpu" else torch.device("meta")
    combine = transport.finalize(torch.zeros(len(came.x), hidden_size, dtype=dtype, device=where), came.handle)
    if where == cpu:
        combine.send()
    num_rows = len(came.x) if where == cpu else most_received(placement.num_ranks, num_tokens)
    return SentBytes(
        dispatch=dispatch.num_bytes(),
        combine=combine.num_bytes(),
        received=num_rows * came.x.stride(0) * came.x.itemsize,  # the row with all that lies beside x
    )


def _choices(config: EngineConfig, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(expert ids, weights) of tokens by the model's own rule, where every expert is as likely as any other."""
    moe = config.model.moe
    generator = torch.Generator().manual_seed(0)
    router = Router(moe, _WIDTH)
    router.weight.copy_(torch.randn(moe.num_experts, _WIDTH, generator=generator))
    weights, ids = router(torch.randn(num_tokens, _WIDTH, generator=generator))
    return ids, weights
