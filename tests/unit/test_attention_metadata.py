"""Metadata declares how it is cut, and the plan made from it reads nothing it must not."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from torch import Tensor

from hocket.attention.base import SLICING_RULES, AttentionMetadata, Sliceable, sliced
from hocket.attention.plan import plan_attention
from hocket.models.base import UBatchInputs


@pytest.mark.parametrize("kind", [AttentionMetadata, UBatchInputs])
def test_every_field_has_a_rule(kind: type[Sliceable]) -> None:
    rules = kind.slicing_rules()
    assert list(rules) == [field.name for field in fields(kind)]  # type: ignore[arg-type]
    assert set(rules.values()) <= set(SLICING_RULES)


def test_a_field_without_a_rule_cannot_be_defined() -> None:
    with pytest.raises(TypeError, match=r"Extra\.forgotten has no slicing rule"):

        @dataclass(frozen=True, kw_only=True)
        class Extra(Sliceable):
            known: Tensor = sliced("tokens")  # noqa: RUF009
            forgotten: Tensor

    with pytest.raises(TypeError, match="slicing rule 'rows'"):
        sliced("rows")


def metadata(lens: list[int], past: list[int], block_size: int, slots: list[int] | None = None) -> AttentionMetadata:
    """Requests with `lens` new tokens after `past`; request r owns blocks 10 · r, 10 · r + 1, …"""
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    seq_lens = [a + b for a, b in zip(lens, past, strict=True)]
    width = max(-(-n // block_size) for n in seq_lens)
    table = torch.tensor([[10 * r + b for b in range(width)] for r in range(len(lens))], dtype=torch.int32)
    where = [
        (10 * r + p // block_size) * block_size + p % block_size
        for r, n in enumerate(lens)
        for p in range(past[r], past[r] + n)
    ]
    return AttentionMetadata(
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        block_table_cpu=table,
        slot_mapping=torch.tensor(where if slots is None else slots, dtype=torch.int64),
        query_start_loc_cpu=tuple(starts),
        seq_lens_cpu=tuple(seq_lens),
        max_query_len=max(lens),
        max_seq_len=max(seq_lens),
        num_tokens=starts[-1],
    )


def test_decodes_are_one_padded_group_that_stays_inside_its_requests() -> None:
    plan = plan_attention(metadata([1, 1], [4, 1], 4), 2, 4, torch.float32)
    [decode] = plan.decodes
    assert decode.rows == slice(0, 2)
    slots = decode.slots.view(2, 5)
    assert slots[0].tolist() == [0, 1, 2, 3, 4]
    assert slots[1].tolist() == [40, 41, 40, 40, 40]  # past its end: its own first slot, masked
    assert torch.isinf(decode.mask[1, 0, 0]).tolist() == [False, False, True, True, True]
    assert plan.prefills == ()


def test_mixed_requests_in_any_order() -> None:
    plan = plan_attention(metadata([3, 1, 2, 1, 0], [0, 2, 5, 0, 3], 4), 9, 4, torch.float32)
    [decode] = plan.decodes
    assert isinstance(decode.rows, Tensor)
    assert decode.rows.tolist() == [3, 6]
    fresh, chunk = plan.prefills
    assert (fresh.start, fresh.stop, fresh.slots) == (0, 3, None)
    assert (chunk.start, chunk.stop, chunk.num_past) == (4, 6, 5)
    assert chunk.slots is not None
    assert chunk.slots.tolist() == [80, 81, 82, 83, 84, 85, 86]
    mask = chunk.mask(torch.device("cpu"))
    assert mask is not None
    assert mask.sum(dim=1).tolist() == [6, 7]
    assert plan.write_rows == slice(0, 7)  # two rows of padding


def test_long_chunks_are_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.attention.plan.MAX_TILE_ROWS", 3)
    plan = plan_attention(metadata([7], [2], 4), 7, 4, torch.float32)
    assert [(t.start, t.stop, t.num_past) for t in plan.prefills] == [(0, 3, 2), (3, 6, 5), (6, 7, 8)]
    assert [len(t.slots) for t in plan.prefills if t.slots is not None] == [5, 8, 9]


@pytest.mark.parametrize(
    ("slots", "rows", "written"),
    [
        ([5, -1, 7], [0, 2], [5, 7]),
        ([-1, -1, -1], None, None),
    ],
)
def test_rows_without_a_slot_are_not_written(
    slots: list[int], rows: list[int] | None, written: list[int] | None
) -> None:
    plan = plan_attention(metadata([3], [0], 4, slots), 3, 4, torch.float32)
    if rows is None:
        assert plan.write_slots is None
    else:
        assert isinstance(plan.write_rows, Tensor)
        assert plan.write_slots is not None
        assert plan.write_rows.tolist() == rows
        assert plan.write_slots.tolist() == written


def test_decodes_that_gather_too_much_are_grouped_by_length(monkeypatch: pytest.MonkeyPatch) -> None:
    past = [9, 1, 0, 8, 2, 1]
    monkeypatch.setattr("hocket.attention.plan.MAX_GATHERED_BYTES", 80)
    [whole] = plan_attention(metadata([1] * 6, past, 4), 6, 4, torch.float32, slot_bytes=1).decodes
    assert whole.rows == slice(0, 6)
    plan = plan_attention(metadata([1] * 6, past, 4), 6, 4, torch.float32, slot_bytes=4)
    assert [group.mask.shape[0] * group.mask.shape[3] for group in plan.decodes] == [20, 12]
    rows = [group.rows.tolist() if isinstance(group.rows, Tensor) else group.rows for group in plan.decodes]
    assert rows == [[0, 3], [1, 2, 4, 5]]
    alone = plan_attention(metadata([1] * 6, past, 4), 6, 4, torch.float32, slot_bytes=100).decodes
    assert [group.num_rows for group in alone] == [1] * 6
