"""The step benchmark's cells, played through the scheduler: enough pure steps, at the context that was asked for."""

from __future__ import annotations

import pytest

from hocket.bench.cells import PHASES, Cell, names, sweep_of, whole_numbers
from hocket.cache.manager import KVCacheManager
from hocket.errors import ConfigError
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.scheduler import Scheduler


def play(cell: Cell, batched_tokens: int) -> tuple[int, float]:
    """(steps of the cell's kind that follow another one, mean tokens that their queries see)."""
    scheduler = Scheduler(
        max_num_seqs=cell.num_running,
        max_num_batched_tokens=batched_tokens,
        max_model_len=cell.longest,
        cache=KVCacheManager(cell.num_running * -(-cell.longest // 16), 16, False),
    )
    params = SamplingParams(max_tokens=cell.output_len)
    for i in range(cell.num_requests):
        scheduler.add(Request(EngineRequest(str(i), [5] * cell.prompt_len, params, [], [], cell.output_len)))
    steps, seen, before = 0, 0.0, False
    while scheduler.has_unfinished:
        batch = scheduler.schedule()
        is_kind = (batch.phase, batch.num_tokens) == (cell.phase, cell.num_tokens)
        if is_kind and before:
            steps += 1
            seen += sum(row.start + 1 for row in batch.requests) / batch.num_tokens
        before = is_kind
        scheduler.commit(batch, [7 if row.needs_sample else None for row in batch.requests])
    assert scheduler.num_preemptions == 0
    return steps, seen / max(steps, 1)


@pytest.mark.parametrize(
    ("num_requests", "context", "num_steps", "batched"),
    [(64, 1024, 32, 4096), (256, 1024, 32, 4096), (256, 1024, 32, 8192), (7, 60, 5, 64), (1, 16, 4, 2048)],
)
def test_decodes(num_requests: int, context: int, num_steps: int, batched: int) -> None:
    cell = Cell.decode(num_requests, context, num_steps, batched)
    steps, mean = play(cell, batched)
    assert num_steps <= steps <= cell.output_len
    assert cell.context == pytest.approx(context, abs=1)
    assert mean == pytest.approx(context, rel=0.02, abs=1.5)


@pytest.mark.parametrize(("batched", "prompt_len", "num_steps"), [(4096, 1024, 8), (64, 40, 2), (100, 300, 3)])
def test_prefills(batched: int, prompt_len: int, num_steps: int) -> None:
    cell = Cell.prefill(batched, prompt_len, num_steps)
    steps, _ = play(cell, batched)
    assert num_steps <= steps <= num_steps + prompt_len // batched + 2


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens: 64"):
        Cell.decode(64, 1024, 8, 64)
    with pytest.raises(ConfigError, match="context: 20"):
        Cell.decode(64, 20, 64, 2048)


def test_a_sweep_has_the_phases_that_were_asked_for() -> None:
    def kinds(*phases: str) -> list[tuple[str, int]]:
        cells = sweep_of(phases, (4, 8), 64, num_steps=4, num_prefill_steps=2, batched_tokens=128)
        return [(cell.phase, cell.num_tokens) for cell in cells]

    assert kinds("decode") == [("decode", 4), ("decode", 8)]
    assert kinds("prefill") == [("prefill", 128)]
    assert kinds(*PHASES) == [*kinds("decode"), *kinds("prefill")]


def test_lists_on_the_command_line() -> None:
    assert whole_numbers("tokens_per_gpu", "64, 128") == (64, 128)
    assert names("phase", "prefill,decode", PHASES) == ("prefill", "decode")
    for wrong in ("", "0", "4,", "4;5", "-1", "4.5"):
        with pytest.raises(ConfigError, match="tokens_per_gpu"):
            whole_numbers("tokens_per_gpu", wrong)
    with pytest.raises(ConfigError, match="phase"):
        names("phase", "decode,idle", PHASES)
