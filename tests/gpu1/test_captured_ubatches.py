"""Ubatches in one CUDA graph, on one GPU: both streams are in it, answers are those of whole steps, and compute hides
transfers in replays too. As in `test_stream_lane.py` nothing is sent anywhere; an engine's steps are split by force.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import greedy, prompts
from checkpoints import make
from in_process import engine_of, in_process_llm
from test_stream_lane_gpu1 import GPU, LINK_US, NUM_LAYERS, Stack, copies, large, parts_of, run, small, transport_of
from torch import Tensor

from hocket.errors import UBatchFailed
from hocket.moe.transport.link_emulator import LinkEmulator
from hocket.overlap.executor import EXECUTORS, UBatchExecutor
from hocket.worker import split_worth
from hocket.worker.capture import Captured, GraphPool
from hocket.worker.stats import overlap_line

__all__ = ["copies", "large", "small"]
BF16: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "max_model_len": 256}


def captured(
    stack: Stack, executor: UBatchExecutor, x: Tensor, n: int, pool: GraphPool
) -> tuple[Captured, list[Tensor]]:
    """The step of x [T, D] in n ubatches, and where its results are after a replay."""
    parts, out = parts_of(x, n), []

    def work() -> None:
        out[:] = [stack(parts[0], [])] if n == 1 else executor.run_captured(parts, [], [None] * n)  # type: ignore[list-item]

    with torch.inference_mode():
        return pool.capture(work), out


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("name", ["local", "allgather_reducescatter"])
@pytest.mark.parametrize("link_us", [None, 100.0])
def test_replayed_ubatches_give_what_whole_steps_do(
    small: Stack, copies: Callable[[float], None], name: str, kind: str, link_us: float | None
) -> None:
    """With other inputs than those captured, copies that come late, and NaN in whatever memory is free."""
    transport = transport_of(name)
    copies(150.0)
    pool = GraphPool()
    for n in (2, 3):
        x = torch.randn(600, 256, device=GPU)
        split = UBatchExecutor(small, kind, n, 30.0, GPU)  # type: ignore[arg-type]
        small.use(transport if link_us is None else LinkEmulator(transport, link_us, 1e9, GPU))
        graph, out = captured(small, split, x, n, pool)
        split.close()  # a replay needs no threads
        small.use(transport_of("local"))
        whole = UBatchExecutor(small, kind, 1, 10.0, GPU)  # type: ignore[arg-type]
        for _ in range(5):
            x.normal_()
            graph.replay()
            torch.testing.assert_close(torch.cat(out), run(whole, parts_of(x, 1)), atol=2e-3, rtol=2e-3)


def test_replays_hide_transfers(large: Stack) -> None:
    """At least 70 % of them, where each stage of compute takes longer than a transfer; of the whole step none."""
    x = torch.zeros(16384, 4096, device=GPU, dtype=torch.bfloat16)
    times = {}
    for link_us in (0.0, LINK_US):
        large.use(LinkEmulator(transport_of("local"), link_us, 1e9, GPU))
        for n in (1, 2):
            executor = UBatchExecutor(large, "greenlet", n, 30.0, GPU)  # type: ignore[arg-type]
            graph, out = captured(large, executor, x, n, GraphPool())
            times[n, link_us] = min(graph.replay_us(2) for _ in range(3))
            del graph, out
    exposed = {n: times[n, LINK_US] - times[n, 0.0] for n in (1, 2)}
    on_link = {n: NUM_LAYERS * 2 * n * LINK_US for n in (1, 2)}
    print("\n" + ", ".join(f"{n} × {us:.0f} µs: {t:.0f} µs" for (n, us), t in times.items()))
    assert times[2, 0.0] > on_link[2], "compute cannot hide so much"
    assert exposed[1] >= 0.8 * on_link[1], "shared experts alone are computed beside"
    assert exposed[2] <= 0.3 * on_link[2]


@pytest.mark.parametrize("kind", EXECUTORS)
@pytest.mark.parametrize("run_of_three", [1, 3])
def test_a_ubatch_that_fails_while_it_is_captured(small: Stack, kind: str, run_of_three: int) -> None:
    """In a warm-up or while it is recorded: it is said where, and the GPU can go on."""
    small.use(transport_of("local"))
    x, runs = torch.randn(600, 256, device=GPU), 0
    router = small.layers[1].router  # type: ignore[union-attr]
    forward = router.forward  # type: ignore[union-attr]

    def fails(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 2 * run_of_three:  # two ubatches a run
            raise ValueError("planted")
        return forward(*args)  # type: ignore[operator]

    router.forward = fails  # type: ignore[union-attr, assignment]
    executor = UBatchExecutor(small, kind, 2, 10.0, GPU)  # type: ignore[arg-type]
    try:
        with pytest.raises(UBatchFailed, match=r"^ubatch 1, sparse layer 1, .*: ValueError: planted$"):
            captured(small, executor, x, 2, GraphPool())
    finally:
        router.forward = forward  # type: ignore[union-attr, assignment]
    torch.cuda.synchronize()
    graph, out = captured(small, executor, x, 2, GraphPool())
    executor.close()
    graph.replay()
    expected = run(UBatchExecutor(small, kind, 1, 10.0, GPU), parts_of(x, 1))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(out), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("model", "n"), [("v2-heads", 2), ("qwen3-heads", 3)])
def test_an_engine_replays_ubatches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, n: int, executor: str
) -> None:
    """The same step by both graphs, over what a run left in the cache: logits differ as bf16 sums do, ids at ties."""
    torch.cuda.set_device(GPU)
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", str(n))
    path = make(model, tmp_path)
    with in_process_llm(path, **BF16, max_num_seqs=8, ubatch_executor=executor) as llm:
        lengths = (1, 2, 7, 33, 64, 120, 5, 9)
        llm.generate(prompts(path, lengths, num_tokens=12), greedy(12), use_tqdm=False)
        [rank] = llm.stats()
        assert rank["graphs"]["graph"] >= 8, rank["graphs"]
        assert rank["overlap"]["reasons"]["decode"]["split"] >= 8
        assert overlap_line(rank["overlap"]).endswith("comm not timed")
        runner = engine_of(llm).runner
        for size in (4, 8):
            found = []
            for num_ubatches in (1, n):
                graph = runner.graphs[size, num_ubatches]
                step = split_worth.stand_ins(size - 1, 64, 0, 16, runner.model.config.vocab_size)
                with torch.inference_mode():
                    graph.replay(step)
                found.append(graph.logits[: size - 1].clone())
            torch.cuda.synchronize()
            assert found[0].isfinite().all()
            spread = float(found[0].std())
            assert float((found[0] - found[1]).abs().max()) < 0.2 * spread, (found, spread)
