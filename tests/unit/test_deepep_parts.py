"""What of DeepEP's transports needs no GPU: numbering of experts, settings, refusals and bytes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hocket.bench.shapes import changed
from hocket.config.backends import CPU_EXPERTS, EP_TRANSPORTS, PLACEMENTS
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import BackendUnavailable, ConfigError
from hocket.explain.memory import held_by_first_rank
from hocket.explain.messages import messages
from hocket.moe.experts.registry import experts_class
from hocket.moe.grouped import GroupedRows
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport import deepep_library as library
from hocket.moe.transport.base import StepSizes, Tokens
from hocket.moe.transport.deepep_high_throughput import DeepEPHighThroughput
from hocket.moe.transport.deepep_low_latency import DeepEPLowLatency
from hocket.moe.transport.deepep_rows import rows_for_others, slots_for_others

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"
SIZES = StepSizes(max_tokens=2048, hidden_size=2048, top_k=6, dtype=torch.bfloat16, num_local_ranks=2)
placements = st.builds(ExpertPlacement, st.integers(1, 40), st.integers(1, 8), st.sampled_from(PLACEMENTS))


@given(placements)
def test_each_expert_has_a_number_of_its_rank(placement: ExpertPlacement) -> None:
    numbering = library.Numbering(placement)
    numbers = numbering.number_of()
    assert len(set(numbers)) == placement.num_experts + 1
    assert numbers[-1] == -1
    for expert in range(placement.num_experts):
        rank, index = divmod(numbers[expert], numbering.per_rank)
        assert rank == placement.rank_of[expert]
        assert numbering.ids_of(rank)[index] == expert
    assert all(numbering.ids_of(rank)[-1] == -1 for rank in range(placement.num_ranks))
    found = numbering.to_numbers(torch.device("cpu"))
    assert (list(range(placement.num_experts)) if found is None else found.tolist()[:-1]) == list(numbers[:-1])


@pytest.mark.parametrize("max_tokens", [1, 511, 512, 2048, 8192])
def test_the_queue_holds_what_may_be_under_way(max_tokens: int) -> None:
    settings = library.nvshmem_settings(max_tokens, {})
    assert int(settings["NVSHMEM_QP_DEPTH"]) >= 2 * (max_tokens + 1)
    assert settings["NVSHMEM_REMOTE_TRANSPORT"] == "none"


def test_what_a_user_set_stays_unless_it_would_fail() -> None:
    given = {"NVSHMEM_REMOTE_TRANSPORT": "ibrc", "NVSHMEM_QP_DEPTH": "65536"}
    assert not set(library.nvshmem_settings(2048, given)) & set(given)
    assert library.nvshmem_settings(2048, {"NVSHMEM_QP_DEPTH": "1024"})["NVSHMEM_QP_DEPTH"] == "8192"


CASES: list[tuple[Any, dict[str, Any], int, str]] = [
    (library.check_high_throughput, {"dtype": torch.float32}, 2, "dtype"),
    (library.check_high_throughput, {"hidden_size": 8192}, 2, "hidden_size"),
    (library.check_high_throughput, {"hidden_size": 2304 + 128}, 2, "hidden_size"),
    (library.check_high_throughput, {"top_k": 33}, 2, "num_experts_per_tok"),
    (library.check_high_throughput, {"num_local_ranks": 3}, 3, "data_parallel_size"),
    (library.check_high_throughput, {"num_local_ranks": 8}, 16, "all2all_backend"),
    (library.check_low_latency, {"dtype": torch.float16}, 2, "dtype"),
    (library.check_low_latency, {"hidden_size": 1024}, 2, "hidden_size"),
    (library.check_low_latency, {"top_k": 12}, 2, "num_experts_per_tok"),
    (library.check_low_latency, {"num_local_ranks": 16}, 16, "data_parallel_size"),
    (library.check_low_latency, {"num_local_ranks": 8}, 16, "all2all_backend"),
]


@pytest.mark.parametrize(("check", "changes", "num_ranks", "field"), CASES)
def test_what_its_kernels_do_not_take_is_refused(
    check: Any, changes: dict[str, Any], num_ranks: int, field: str
) -> None:
    numbering = library.Numbering(ExpertPlacement(64, num_ranks))
    check(SIZES, library.Numbering(ExpertPlacement(64, 2)))
    with pytest.raises(ConfigError) as caught:
        check(replace(SIZES, **changes), numbering)
    assert caught.value.field == field


def test_too_many_experts_of_a_rank_are_refused() -> None:
    with pytest.raises(ConfigError, match="over 128 experts"):
        library.check_high_throughput(SIZES, library.Numbering(ExpertPlacement(384, 2)))


@pytest.mark.parametrize("transport", [DeepEPHighThroughput, DeepEPLowLatency])
def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, transport: type[DeepEPHighThroughput] | type[DeepEPLowLatency]
) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    made = transport(ExpertPlacement(64, 2), 0, None, torch.device("cpu"))
    with pytest.raises(BackendUnavailable, match="it needs tokenspeed-deepep==") as caught:
        made.open(SIZES)
    assert len(str(caught.value).splitlines()) == 1


def test_bytes_by_arithmetic_are_near_those_expected() -> None:
    """Of random choices, each expert as likely as any other; and what a hand count gives for one token."""
    placement, num_tokens = ExpertPlacement(64, 4), 4000
    ids = torch.rand(num_tokens, 64, generator=torch.Generator().manual_seed(0)).argsort(1)[:, :6]
    tokens = Tokens(placement=placement, ids=ids, hidden_size=2048, dtype=torch.bfloat16)
    high, low = DeepEPHighThroughput.sent_bytes(tokens), DeepEPLowLatency.sent_bytes(tokens)
    assert high is not None
    assert low is not None
    assert high.combine / 4096 == pytest.approx(rows_for_others(num_tokens, placement, 6, 0), rel=0.02)
    assert low.combine / 4096 == pytest.approx(slots_for_others(num_tokens, placement, 6, 0), rel=0.02)
    one = replace(tokens, ids=torch.tensor([[0, 16, 17, 40, -1, -1]]))  # one of its own, two of rank 1, one of rank 2
    high, low = DeepEPHighThroughput.sent_bytes(one), DeepEPLowLatency.sent_bytes(one)
    assert high is not None
    assert low is not None
    assert (high.combine, low.combine) == (2 * 4096, 3 * 4096)


def test_explain_tells_bytes_and_memory_without_a_gpu() -> None:
    options = {
        "model": str(SHAPES / "deepseek-v2-lite"),
        "load_format": "dummy",
        "data_parallel_size": 2,
        "enable_expert_parallel": True,
        "all2all_backend": "deepep_low_latency",
    }
    config = resolve(Options.from_dict(options), 2)
    (said,) = (one for one in messages(config) if one["is_chosen"])
    assert said["combine_bytes"] == pytest.approx(3 * 4096, rel=0.1)
    # Four areas of 64 experts · 2048 tokens · (2048 bf16 and, per 128 of them, two bf16).
    assert said["reserved_bytes"] * 2048 == 4 * 64 * 2048 * (4096 + 64) == 2181038080
    assert {one["name"] for one in messages(config)} == set(EP_TRANSPORTS)


def test_explain_counts_rows_in_fp8_where_experts_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only low latency sends them so, and only there; what it keeps has room for bf16 all the same."""
    width, options = 7168, Options(model=str(SHAPES / "deepseek-v3-fp8"), load_format="dummy", device="cuda")
    wide = replace(options, data_parallel_size=8, enable_expert_parallel=True)
    with changed(wide, None, 4) as (few_layers, _):
        config = resolve(few_layers, 8)
        assert held_by_first_rank(config).sends_fp8
        plain, found = ({one["name"]: one for one in messages(config, is_fp8)} for is_fp8 in (False, True))
        low, low_plain = found.pop("deepep_low_latency"), plain.pop("deepep_low_latency")
        assert found == plain
        assert not any(one["is_fp8"] for one in plain.values())
        assert (low["is_fp8"], low_plain["is_fp8"]) == (True, False)
        copies = low["combine_bytes"] / (2 * width)
        assert copies == pytest.approx(7, rel=0.03), "of eight, one rank in eight is its own"
        assert low["dispatch_bytes"] == copies * (width + width // 128 * 4 + 16)
        assert low_plain["dispatch_bytes"] == copies * (2 * width + 16)
        places = low_plain["received_bytes"] / (2 * width)
        assert low["received_bytes"] == places * (width + width // 128 * 4)
        assert low["reserved_bytes"] == low_plain["reserved_bytes"]
        assert not held_by_first_rank(resolve(replace(few_layers, moe_backend="triton_grouped"), 8)).sends_fp8
        monkeypatch.setenv("HOCKET_FP8", "0")
        assert not held_by_first_rank(config).sends_fp8


@pytest.mark.parametrize("backend", CPU_EXPERTS)
@pytest.mark.parametrize("counts", [(3, 0, 8, 1), (0, 0, 0, 0), (8, 8, 8, 8), (0, 0, 0, 1)])
def test_rows_by_expert_give_what_rows_with_ids_give(backend: str, counts: tuple[int, ...]) -> None:
    """Places without a row hold NaN."""
    local_id_of = torch.tensor([-1, 0, -1, 1, 2, -1, 3, -1, -1])
    experts = experts_class(backend)(4, 24, 16, num_experts=8, local_id_of=local_id_of)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.full((4, 8, 24), torch.nan)
    for expert, count in enumerate(counts):
        x[expert, :count] = torch.randn(count, 24)
    rows = GroupedRows(x=x, counts=torch.tensor(counts, dtype=torch.int32), max_rows=32, expected_rows=3.0)
    out = experts.forward_grouped(rows)
    assert out.shape == x.shape
    for expert, (count, number) in enumerate(zip(counts, (1, 3, 4, 6), strict=True)):
        alone = experts(x[expert, :count], torch.full((count, 1), number), torch.ones(count, 1))
        assert torch.equal(out[expert, :count], alone)
    assert experts.local_id_of is local_id_of


def test_taken_places_are_in_order_and_the_rest_is_marked() -> None:
    rows = GroupedRows(x=torch.zeros(3, 4, 1), counts=torch.tensor([2, 0, 3]), max_rows=7, expected_rows=2.0)
    expert, place = rows.taken()
    assert expert.tolist() == [0, 0, 2, 2, 2, -1, -1]
    assert place.tolist() == [0, 1, 8, 9, 10, 12, 12]
