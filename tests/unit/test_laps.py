"""Waiting for other ranks is told apart from the exchange itself."""

from __future__ import annotations

from hocket.overlap.vote import NUM_ROWS, Row
from hocket.worker.laps import split_exchange


def column(arrival_us: int) -> list[int]:
    values = [0] * NUM_ROWS
    values[Row.ARRIVAL_US] = arrival_us
    return values


def test_waiting_for_a_later_rank_is_not_the_exchange() -> None:
    assert split_exchange([column(1000), column(1300)], table_us=1340, total_us=340.0) == (40.0, 300.0)
    assert split_exchange([column(1300), column(1000)], table_us=1340, total_us=40.0) == (40.0, 0.0)


def test_the_clock_may_wrap() -> None:
    wrapped = [column(0x7FFFFFF0), column(5)]
    assert split_exchange(wrapped, table_us=15, total_us=31.0) == (10.0, 21.0)
