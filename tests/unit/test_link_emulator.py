"""An emulated link delivers when a real one of its latency and bandwidth would, and says when that was."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.moe.base import TokenLayout
from hocket.moe.transport import link_copies
from hocket.moe.transport.base import Dispatched, Handle, Transport
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.ubatch.transfer import Transfer

NUM_BYTES = 1_000_000
LAYOUT = TokenLayout.of(1, 1, 1, torch.device("cpu"))


class Inner(Transport):
    """Takes `seconds` to send NUM_BYTES."""

    name = "inner"
    requires_padding = True

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def prepare(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, layout: TokenLayout) -> Transfer[Dispatched]:
        sent = Dispatched(x, topk_ids, topk_weights, Handle())
        return Transfer(lambda: time.sleep(self.seconds), lambda: sent, lambda: NUM_BYTES)

    def finalize(self, expert_out: Tensor, handle: Handle) -> Transfer[Tensor]:
        return Transfer(lambda: time.sleep(self.seconds), lambda: expert_out, lambda: NUM_BYTES)


def run(transfer: Transfer[Tensor]) -> tuple[float, float, float]:
    """Seconds from the start until the send, the receive, and by its own word the delivery were over."""
    assert transfer.receive is not None
    assert transfer.arrived_ns is not None
    began = time.perf_counter()
    transfer.send()
    sent = time.perf_counter()
    transfer.receive()
    return sent - began, time.perf_counter() - began, transfer.arrived_ns() / 1e9 - began


@pytest.mark.parametrize(("inner_s", "gb_per_s", "latency_us"), [(0.0, 0.05, 5000.0), (0.04, 1.0, 100.0)])
def test_a_transfer_ends_with_the_slower_of_link_and_inner_transport(
    inner_s: float, gb_per_s: float, latency_us: float
) -> None:
    link_s = latency_us / 1e6 + NUM_BYTES / gb_per_s / 1e9
    link = LinkEmulator(Inner(inner_s), latency_us, gb_per_s)
    out = torch.ones(1)
    transfer = link.finalize(out, Handle())
    sent, received, delivered = run(transfer)
    assert received >= max(inner_s, link_s)
    assert max(inner_s, link_s) * 0.999 <= delivered <= received, "what it took is never understated"
    assert sent >= inner_s
    assert transfer.result() is out
    assert transfer.num_bytes() == NUM_BYTES


def test_the_link_carries_one_transfer_at_a_time() -> None:
    """Two sent at once arrive one after the other; one received late had arrived in time."""
    link = LinkEmulator(Inner(0.0), 0.0, 0.05)
    first, second = (link.finalize(torch.ones(1), Handle()) for _ in range(2))
    began = time.perf_counter()
    first.send()
    second.send()
    assert second.receive is not None
    assert second.arrived_ns is not None
    assert first.arrived_ns is not None
    second.receive()
    assert time.perf_counter() - began >= 0.04
    assert first.arrived_ns() / 1e9 >= began + 0.0199
    assert first.arrived_ns() <= second.arrived_ns() - 19_900_000, "its own delivery, not when somebody asked"


def test_the_volume_of_another_deployment_counts_instead_of_what_is_sent() -> None:
    """7 MB/s: three tokens of 10,000 bytes out and 30,000 back, whatever the inner transport sends."""
    link = LinkEmulator(Inner(0.0), 0.0, 0.007, token_bytes=(10_000.0, 30_000.0))
    x, layout = torch.ones(3, 4), TokenLayout.of(3, 3, 3, torch.device("cpu"))
    dispatch = link.prepare(x, x, x, layout)
    began = time.perf_counter()
    dispatch.send()
    assert dispatch.receive is not None
    dispatch.receive()
    assert time.perf_counter() - began >= 30_000 / 7e6
    sent = dispatch.result()
    assert sent.x is x
    combine = link.finalize(x, sent.handle)
    assert (dispatch.num_bytes(), combine.num_bytes()) == (30_000, 90_000)
    combine.send()
    assert combine.result() is x
    nothing = link.prepare(x[:0], x[:0], x[:0], TokenLayout.of(0, 0, 3, torch.device("cpu")))
    assert nothing.num_bytes() == 0


def test_on_a_gpu_copies_take_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the inner transfer, from its beginning, for what is known by then; the host sleeps for nothing."""
    done: list[object] = []

    class Delay:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def mark(self) -> str:
            done.append("mark")
            return "here"

        def start(self, mark: str, seconds: float) -> str:
            done.append((mark, seconds))
            return "end"

        def wait(self, end: str) -> None:
            done.append(f"wait for {end}")

    monkeypatch.setattr(link_copies, "CopyDelay", Delay)
    inner = Inner(0.0)
    link = LinkEmulator(inner, 500_000.0, 0.001, torch.device("cuda", 0))
    assert link.captures is inner.captures
    monkeypatch.setattr(time, "sleep", lambda seconds: done.append(f"inner {seconds:g}"))
    out = torch.ones(1)
    for transfer in (link.finalize(out, Handle()), link.prepare(out, out, out, LAYOUT)):
        done.clear()
        assert transfer.receive is not None
        transfer.send()
        transfer.receive()
        assert done == ["mark", "inner 0", ("here", 0.5 + NUM_BYTES / 1e6), "wait for end"]
        assert transfer.arrived_ns is None


def test_how_long_copies_take_is_measured_or_an_error() -> None:
    """2 MiB in 50 µs and 32 in 650: 30 MiB in 600, and 10 for a copy of nothing."""
    bytes_per_s, least_s = link_copies.rate_of(50e-6, 650e-6)
    assert (bytes_per_s, least_s) == pytest.approx((30 * 2**20 / 600e-6, 10e-6))
    assert link_copies.rate_of(10e-6, 650e-6)[1] == 0.0
    with pytest.raises(HocketError, match="2 MiB took 600 µs, 32 MiB took 600 µs; is it too busy"):
        link_copies.rate_of(600e-6, 600e-6)
