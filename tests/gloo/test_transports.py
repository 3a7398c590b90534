"""Transports on 1 to 4 gloo ranks against one rank that has all experts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from configs import MOE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import RankEnv, RankPool, RanksFailed
from torch import Tensor, nn

from hocket.config.backends import CPU_EXPERTS, NCCL_TRANSPORTS, PLACEMENTS
from hocket.dist import collectives
from hocket.dist.mesh import Mesh
from hocket.errors import CapacityError, HocketError, RankLost, StepDesync
from hocket.moe.base import TokenLayout
from hocket.moe.experts.base import Experts
from hocket.moe.experts.registry import experts_class
from hocket.moe.factory import MoEFactory
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.base import Dispatched, Handle, Transport
from hocket.moe.transport.registry import build_transport
from hocket.moe.transport.rows import RowFormat
from hocket.trace.spans import Stage
from hocket.ubatch.transfer import Running

CPU = torch.device("cpu")
HIDDEN, INTER = 24, MOE.intermediate_size
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@dataclass(frozen=True)
class Case:
    """One exchange. `tokens` and `padding` are rows per rank; `ids`: random | one_rank | dropped (all are -1)."""

    tokens: tuple[int, ...]
    padding: tuple[int, ...]
    num_experts: int
    top_k: int
    strategy: str = "linear"
    ids: str = "random"
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def placement(self) -> ExpertPlacement:
        return ExpertPlacement(self.num_experts, len(self.tokens), self.strategy)

    def layout(self, rank: int) -> TokenLayout:
        rows = [a + b for a, b in zip(self.tokens, self.padding, strict=True)]
        return TokenLayout.of(self.tokens[rank], rows[rank], max(rows), CPU)


def make_experts(case: Case, backend: str, rank: int | None = None) -> Experts:
    """A rank's experts, all where it is None, with weights that depend on the case only."""
    generator = torch.Generator().manual_seed(case.seed)
    placement = ExpertPlacement(case.num_experts, 1) if rank is None else case.placement
    ids, local_id_of = placement.experts_of(rank or 0), torch.tensor(placement.local_id_of(rank or 0))
    experts = experts_class(backend)(
        len(ids), HIDDEN, INTER, num_experts=case.num_experts, local_id_of=local_id_of, dtype=case.dtype
    )
    for parameter, fan_in in ((experts.w13, HIDDEN), (experts.w2, INTER)):
        full = torch.randn(case.num_experts, *parameter.shape[1:], generator=generator) * fan_in**-0.5
        parameter.copy_(full[list(ids)])
    return experts


def make_tokens(case: Case, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's (x, ids, weights). Rows without any expert, padding among them, hold NaN."""
    generator = torch.Generator().manual_seed(case.seed * 7 + rank + 1)
    num_rows = case.tokens[rank] + case.padding[rank]
    x = torch.randn(num_rows, HIDDEN, generator=generator).to(case.dtype)
    weights = torch.rand(num_rows, case.top_k, generator=generator)
    pool = torch.arange(case.num_experts)
    if case.ids == "one_rank":
        pool = torch.tensor(case.placement.experts_of(0))
    scores = torch.rand(num_rows, len(pool), generator=generator)
    ids = torch.full((num_rows, case.top_k), -1)
    chosen = pool[scores.argsort(dim=1)[:, : case.top_k]]
    ids[:, : chosen.shape[1]] = chosen
    is_dropped = torch.rand(ids.shape, generator=generator) < (1.0 if case.ids == "dropped" else 0.3)
    ids[is_dropped] = -1
    ids[case.tokens[rank] :] = -1
    x[(ids < 0).all(dim=1)] = torch.nan
    return x, ids, weights


def make_transport(env: RankEnv, case: Case, name: str) -> Transport:
    num_ranks = len(case.tokens)
    return build_transport(name, case.placement, rank=env.rank, group=env.groups[num_ranks], device=CPU)


def prepared(transport: Transport, x: Tensor, ids: Tensor, weights: Tensor, layout: TokenLayout) -> Dispatched:
    """A dispatch run to its end at once."""
    return Running(transport.prepare(x, ids, weights, layout), Stage.DISPATCH).finish(Stage.EXPERTS)


def finalized(transport: Transport, expert_out: Tensor, handle: Handle) -> Tensor:
    """A combine run to its end at once."""
    return Running(transport.finalize(expert_out, handle), Stage.COMBINE).finish(Stage.QKV)


def check_case(env: RankEnv, case: Case) -> None:
    """On a rank: both transports with both backends give what all experts on one rank give."""
    x, ids, weights = make_tokens(case, env.rank)
    everything = make_experts(case, "reference")
    expected = everything(x, ids, weights).float()
    assert expected.isfinite().all()
    for name in NCCL_TRANSPORTS:
        transport = make_transport(env, case, name)
        for backend in CPU_EXPERTS:
            experts = make_experts(case, backend, env.rank)
            sent = prepared(transport, x, ids, weights, case.layout(env.rank))
            out = finalized(transport, experts(sent.x, sent.ids, sent.weights), sent.handle)
            assert out.dtype == case.dtype
            assert out.shape == x.shape
            limit = TOLERANCE[case.dtype]
            assert torch.allclose(out.float(), expected, atol=limit, rtol=limit), (name, backend, out - expected)
            assert not out[(ids < 0).all(dim=1)].any(), "a row without experts is zero"


def crossing_bytes(env: RankEnv, case: Case) -> tuple[int, int, list[int]]:
    """What a rank says it sent to others in dispatch and in combine; and, of its rows, how many go to each rank."""
    x, ids, weights = make_tokens(case, env.rank)
    transport = make_transport(env, case, "torch")
    dispatch = transport.prepare(x, ids, weights, case.layout(env.rank))
    sent = Running(dispatch, Stage.DISPATCH).finish(Stage.EXPERTS)
    combine = transport.finalize(torch.zeros_like(sent.x), sent.handle)
    Running(combine, Stage.COMBINE).finish(Stage.QKV)
    owners = [{case.placement.rank_of[expert] for expert in row if expert >= 0} for row in ids.tolist()]
    return dispatch.num_bytes(), combine.num_bytes(), [sum(r in o for o in owners) for r in range(len(case.tokens))]


def test_bytes_are_those_that_cross_to_another_rank(pool: RankPool) -> None:
    case = Case((5, 9, 2), (1, 0, 3), 8, 3)
    row_bytes = RowFormat(HIDDEN, case.top_k, case.dtype).row_bytes
    found = pool.run(crossing_bytes, case, num_ranks=3)
    wanted = [rows for _, _, rows in found]
    for rank, (dispatched, combined, rows) in enumerate(found):
        assert sum(rows) - rows[rank] > 0
        assert dispatched == (sum(rows) - rows[rank]) * row_bytes
        back = sum(wanted[other][rank] for other in range(3) if other != rank)
        assert combined == back * RowFormat(HIDDEN, 0, case.dtype).row_bytes


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(1, 4))
    rows = st.lists(st.integers(0, 9), min_size=num_ranks, max_size=num_ranks).map(tuple)
    num_experts = draw(st.integers(1, 12))
    return Case(
        tokens=draw(rows),
        padding=draw(rows),
        num_experts=num_experts,
        top_k=draw(st.integers(1, min(8, num_experts))),
        strategy=draw(st.sampled_from(PLACEMENTS)),
        ids=draw(st.sampled_from(("random", "random", "one_rank", "dropped"))),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16))),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(case=cases())
def test_any_dispatch_equals_one_rank(pool: RankPool, case: Case) -> None:
    pool.run(check_case, case, num_ranks=len(case.tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "padding", "num_experts", "top_k", "ids"),
    [
        ((0, 0), (0, 0), 4, 2, "random"),  # nobody has a row
        ((0, 5), (0, 0), 4, 2, "random"),
        ((0, 40, 3, 1), (1, 0, 9, 0), 16, 8, "random"),
        ((5, 5, 5), (0, 2, 0), 2, 2, "random"),  # a rank without experts
        ((6, 6, 6, 6), (0, 0, 0, 0), 16, 4, "one_rank"),
        ((3, 4), (2, 1), 8, 3, "dropped"),
    ],
)
def test_corners(
    pool: RankPool,
    tokens: tuple[int, ...],
    padding: tuple[int, ...],
    num_experts: int,
    top_k: int,
    ids: str,
    dtype: torch.dtype,
) -> None:
    case = Case(tokens, padding, num_experts, top_k, ids=ids, dtype=dtype)
    pool.run(check_case, case, num_ranks=len(tokens))


def check_interleaved(env: RankEnv, name: str) -> None:
    """Two calls of one instance under way at once, finished in the other order."""
    first, second = Case((3, 5), (1, 0), 6, 2, seed=1), Case((4, 0), (0, 2), 6, 3, seed=1)
    transport = make_transport(env, first, name)
    experts = make_experts(first, "reference", env.rank)
    everything = make_experts(first, "reference")

    def expert_out(sent: Dispatched) -> Tensor:
        return experts(sent.x, sent.ids, sent.weights)

    inputs = [make_tokens(case, env.rank) for case in (first, second)]
    sent = [prepared(transport, *i, c.layout(env.rank)) for i, c in zip(inputs, (first, second), strict=True)]
    results = [expert_out(s) for s in sent]
    for index in (1, 0):
        out = finalized(transport, results[index], sent[index].handle)
        torch.testing.assert_close(out, everything(*inputs[index]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", NCCL_TRANSPORTS)
def test_two_calls_may_be_under_way(pool: RankPool, name: str) -> None:
    pool.run(check_interleaved, name, num_ranks=2)


def sent_rows(env: RankEnv, name: str) -> tuple[int, int]:
    """Four tokens of rank 0, each with both experts of rank 1 and one of rank 0: (rows here, rows with an expert)."""
    case = Case((4, 0), (0, 0), 4, 3)
    transport = make_transport(env, case, name)
    x = torch.ones(case.tokens[env.rank], HIDDEN)
    ids = torch.tensor([[0, 2, 3]]).expand(len(x), -1)
    sent = prepared(transport, x, ids, torch.ones(ids.shape), case.layout(env.rank))
    finalized(transport, torch.zeros(sent.x.shape), sent.handle)
    is_here = torch.isin(sent.ids, torch.tensor(case.placement.experts_of(env.rank)))
    return len(sent.x), int(is_here.any(dim=1).sum())


def test_torch_sends_a_token_once_per_rank(pool: RankPool) -> None:
    assert pool.run(sent_rows, "torch", num_ranks=2) == [(4, 4), (4, 4)]
    assert pool.run(sent_rows, "allgather_reducescatter", num_ranks=2) == [(8, 4), (8, 4)]


def refused(env: RankEnv, name: str) -> list[str]:
    """Errors that a rank meets before any collective, so that its peers are not left waiting."""
    case = Case((2, 2), (0, 0), 4, 2)
    transport = make_transport(env, case, name)
    x, weights = torch.zeros(2, HIDDEN), torch.ones(2, 2)
    messages = []
    for wrong in (-2, 4):
        with pytest.raises(HocketError) as caught:
            prepared(transport, x, torch.tensor([[0, 1], [wrong, -1]]), weights, case.layout(env.rank))
        messages.append(str(caught.value))
    if transport.requires_padding:
        with pytest.raises(CapacityError, match="2 rows"):
            prepared(transport, x, torch.tensor([[0, 1], [2, -1]]), weights, TokenLayout.of(1, 1, 1, CPU))
    return messages


@pytest.mark.parametrize("name", NCCL_TRANSPORTS)
def test_ids_out_of_range(pool: RankPool, name: str) -> None:
    for messages in pool.run(refused, name, num_ranks=2):
        assert "from -2 to 1" in messages[0]
        assert "from -1 to 4" in messages[1]
        assert all(m.startswith("expert ids must be -1 or in [0, 4)") for m in messages)


def make_layer(mesh: Mesh, transport: str, backend: str) -> MoELayer:
    placement = ExpertPlacement(MOE.num_experts, mesh.ep_size, "round_robin")
    torch.manual_seed(3)
    shared = nn.Linear(HIDDEN, HIDDEN, bias=False)
    factory = MoEFactory(mesh, placement, transport, backend)
    layer = factory.build(MOE, HIDDEN, "silu", shared, CPU, torch.float32)
    case = Case((1,) * mesh.ep_size, (0,) * mesh.ep_size, MOE.num_experts, MOE.top_k, strategy="round_robin")
    experts = make_experts(case, "reference", mesh.ep_rank)
    layer.experts.load_state_dict(experts.state_dict())
    nn.init.normal_(layer.router.weight)
    bias = layer.router.e_score_correction_bias
    assert bias is not None
    nn.init.normal_(bias, std=0.3)
    return layer


@torch.inference_mode()
def check_layer(env: RankEnv, transport: str, backend: str) -> list[int]:
    """The layer on three ranks equals the layer on one, and padding of NaN stays where it is. Returns the load."""
    mesh = Mesh(rank=env.rank, world_size=3, device=CPU, ep_group=env.groups[3])
    layer = make_layer(mesh, transport, backend)
    alone = make_layer(Mesh(rank=0, world_size=1, device=CPU), "local", "reference")
    layer.count_expert_load()
    num_tokens = (7, 0, 4)[env.rank]
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(env.rank))
    x[num_tokens:] = torch.nan
    out = layer(x, TokenLayout.of(num_tokens, 9, 9, CPU))
    expected = alone(x[:num_tokens], TokenLayout.of(num_tokens, num_tokens, num_tokens, CPU))
    torch.testing.assert_close(out[:num_tokens], expected, atol=1e-5, rtol=1e-5)
    load = layer.expert_load
    assert load is not None
    assert int(load.sum()) == num_tokens * MOE.top_k
    return [int(v) for v in load]


@pytest.mark.parametrize("backend", CPU_EXPERTS)
@pytest.mark.parametrize("transport", NCCL_TRANSPORTS)
def test_layer_on_three_ranks(pool: RankPool, transport: str, backend: str) -> None:
    pool.run(check_layer, transport, backend, num_ranks=3)


def check_collectives(env: RankEnv, dtype: torch.dtype, num_rows: int) -> None:
    group = env.groups[3]
    mine = torch.arange(num_rows * 2).view(num_rows, 2).to(dtype) + env.rank
    gathered = torch.empty(3 * num_rows, 2, dtype=dtype)
    collectives.all_gather(gathered, mine, group)
    assert torch.equal(gathered, torch.cat([mine - env.rank + rank for rank in range(3)]))


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_collectives(pool: RankPool, dtype: torch.dtype, num_rows: int) -> None:
    pool.run(check_collectives, dtype, num_rows, num_ranks=3)


def time_out(env: RankEnv) -> tuple[float, str]:
    """Rank 1 never comes: how long rank 0 waits and what it then sees."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.5))
    if env.rank > 0:
        time.sleep(1.5 if env.rank == 1 else 0.0)  # alive, so that rank 0 meets the time-out, not a closed connection
        return 0.0, ""
    case = Case((1, 1), (0, 0), 4, 2)
    transport = build_transport("torch", case.placement, rank=0, group=group, device=CPU)
    began = time.monotonic()
    with pytest.raises(RankLost) as caught:
        prepared(transport, *make_tokens(case, 0), case.layout(0))
    return time.monotonic() - began, str(caught.value)


def test_a_missing_rank_ends_in_the_groups_time_out(pool: RankPool) -> None:
    waited, message = pool.run(time_out, timeout_s=10.0)[0]
    assert 0.3 < waited < 5.0
    assert "Timed out" in message


def fail_and_hang(env: RankEnv) -> None:
    if env.rank == 0:
        raise ValueError("rank 0 is at fault")
    dist.barrier(env.groups[2])


def test_the_pool_itself_ends_in_time_and_names_ranks(pool: RankPool) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 0 is at fault.*ranks late: \[1\]"):
        pool.run(fail_and_hang, num_ranks=2)


def skip_one(env: RankEnv, name: str, what: str, where: str) -> str:
    """Rank 1 leaves out one transfer, or two (counted, but not run): what each rank sees at the next one, `where`."""
    case = Case((6, 6), (1, 1), 4, 2)  # rows of each rank for the other, as every token has two experts of four
    transport = make_transport(env, case, name)
    tokens = make_tokens(case, env.rank)
    sent = prepared(transport, *tokens, case.layout(env.rank))
    sums = torch.zeros(sent.x.shape)
    if where == "dispatch":
        finalized(transport, sums, sent.handle)
    if env.rank == 1:
        transport.prepare(*tokens, case.layout(env.rank))
        if what == "both":
            transport.finalize(sums, sent.handle)
    try:
        if where == "dispatch":
            prepared(transport, *tokens, case.layout(env.rank))
        else:
            finalized(transport, sums, sent.handle)
    except StepDesync as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NCCL_TRANSPORTS)
@pytest.mark.parametrize("what", ["one", "both"])
@pytest.mark.parametrize(("where", "number"), [("dispatch", 2), ("combine", 1)])
def test_a_rank_at_another_transfer_is_named(pool: RankPool, name: str, what: str, where: str, number: int) -> None:
    messages = pool.run(skip_one, name, what, where, num_ranks=2)
    ahead = number + (1 if what == "one" else 2)
    assert messages[0] == f"what rank 1 sent is not of transfer {number}, which this rank is at"
    assert messages[1] == f"what rank 0 sent is not of transfer {ahead}, which this rank is at"
