"""What is said of replays of whole steps and of ubatches, and the rows that stand in for requests meanwhile."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hocket.worker.split_worth import Compared, say, stand_ins

FASTER, EQUAL, SLOWER = 0.8, 1.01, 1.3


def found(*ratios: float) -> list[Compared]:
    """Of 32, 40, 48 … rows, the whole step of 10 ms."""
    return [Compared(32 + 8 * i, 10_000.0, 10_000.0 * ratio) for i, ratio in enumerate(ratios)]


@pytest.mark.parametrize(
    ("ratios", "advice"),
    [
        ((SLOWER, SLOWER, EQUAL, FASTER), "--dbo-decode-token-threshold 41 splits them from 48 rows on"),
        ((FASTER, SLOWER, FASTER), "--dbo-decode-token-threshold 41 splits them from 48 rows on"),
        ((FASTER, SLOWER), "--no-split-graphs leaves them whole"),
        ((SLOWER,), "--no-split-graphs leaves them whole"),
    ],
)
def test_one_warning_where_splitting_takes_longer(
    caplog: pytest.LogCaptureFixture, ratios: tuple[float, ...], advice: str
) -> None:
    caplog.set_level(logging.INFO, "hocket")
    say(found(*ratios), 2, 1024)
    [record] = caplog.records
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    assert message.startswith(
        "splitting costs time here: decodes replayed whole and in 2 ubatches take 32 rows 10.00 and "
    )
    assert f"rows 10.00 and {ratios[-1] * 10:.2f} ms; contexts of 1,024 tokens; {advice}" in message


@pytest.mark.parametrize("ratios", [(EQUAL,), (FASTER, EQUAL, FASTER)])
def test_no_warning_where_it_does_not(caplog: pytest.LogCaptureFixture, ratios: tuple[float, ...]) -> None:
    caplog.set_level(logging.INFO, "hocket")
    say(found(*ratios), 3, 64)
    [record] = caplog.records
    assert record.levelno == logging.INFO
    assert "whole and in 3 ubatches" in record.getMessage()


def test_every_size_that_is_slower_is_shown_or_between_two_that_are(caplog: pytest.LogCaptureFixture) -> None:
    say(found(*[SLOWER] * 13), 2, 1024)
    assert [int(part.split()[0]) for part in caplog.text.split("take ")[1].split(";")[0].split(", ")] == [32, 64, 128]


@given(st.integers(1, 300), st.integers(1, 2000), st.integers(0, 9), st.sampled_from([1, 4, 64]), st.integers(2, 5000))
def test_stand_ins_stay_in_one_block(rows: int, context: int, block: int, block_size: int, vocabulary: int) -> None:
    host = stand_ins(rows, context, block, block_size, vocabulary)
    assert host.num_tokens == len(host.seq_lens) == rows
    assert set((host.slots // block_size).tolist()) == {block}
    assert set(host.block_table.flatten().tolist()) == {block}
    assert host.block_table.shape[1] * block_size >= context
    assert set(host.seq_lens.tolist()) == {context}
    assert set(host.positions.tolist()) == {context - 1}
    assert host.token_ids.min() >= 0
    assert host.token_ids.max() < vocabulary
    assert len(set(host.token_ids.tolist())) == min(rows, vocabulary)
    assert host.query_start.tolist() == list(range(rows + 1))
    assert host.token_ids.dtype == np.int64
