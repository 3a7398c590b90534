"""One sparse layer alone, on ranks of its own: what routing, transfers and experts take. Knows no engine's steps.

The front's part: it starts one process per rank (`layer_rank.py`) and puts their figures together.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from hocket.bench.floor import Rates, StepShape, step_parts
from hocket.bench.rates import GivenRates, rates_of
from hocket.bench.report import check_output, emit, link_of, provenance, spread
from hocket.bench.shapes import Slice, changed
from hocket.bench.table import table_of
from hocket.config.engine import EngineConfig
from hocket.config.model import ModelConfig
from hocket.config.options import Options
from hocket.config.resolve import model_folder, resolve
from hocket.dist.processes import rank_environment
from hocket.dist.record import Records
from hocket.errors import HocketError

LIMIT_S = 600.0
"""For all of it: a rank that hangs must not hold the others for ever."""
_POLL_S = 0.05
VOCAB_SIZE = 256
PARTS = ("router", "dispatch", "experts", "combine", "layer")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Tokens of each rank, names of backends, and which shape of the model. `rounds`: calls that one figure goes over.

    experts, transports: "auto" or names; every pair of them is measured.
    """

    tokens_per_gpu: tuple[int, ...]
    experts: tuple[str, ...] = ("auto",)
    transports: tuple[str, ...] = ("auto",)
    repeats: int = 5
    rounds: int = 10
    rates: GivenRates = field(default_factory=GivenRates)
    slice_of_ep: int | None = None


class Orders(msgspec.Struct):
    """What the ranks are told: one configuration for each pair of backends, of a model of one sparse layer."""

    world_size: int
    configs: list[EngineConfig]
    tokens_per_gpu: list[int]
    repeats: int
    rounds: int
    use_graphs: bool


class Measured(msgspec.Struct):
    """Of one rank, one configuration, one number of tokens: µs by part, one entry per repeat.

    experts: the backend that was used. eager: parts that could not be captured in a CUDA graph (all of them on a CPU).
    """

    config_idx: int
    tokens_per_gpu: int
    us: dict[str, list[float]]
    experts: str
    eager: list[str]
    is_fp8: bool = False


def run(options: Options, sweep: Sweep, *, output: str | None) -> dict[str, Any]:
    """Measure every pair of backends at every number of tokens, in turn; print a table and, last, JSON."""
    check_output(output)
    with changed(replace(options, load_format="dummy"), sweep.slice_of_ep, None) as (shaped, slice_of):
        configs = [_config(shaped, sweep, t, e) for t in sweep.transports for e in sweep.experts]
    rates = rates_of(configs[0].device, sweep.rates)
    orders = Orders(
        world_size=configs[0].parallel.data_parallel_size,
        configs=configs,
        tokens_per_gpu=list(sweep.tokens_per_gpu),
        repeats=sweep.repeats,
        rounds=sweep.rounds,
        use_graphs=not options.enforce_eager,
    )
    by_rank = _run_ranks(orders)
    rows = [
        {"model": options.model} | _row(ranks, configs[ranks[0].config_idx], slice_of, rates)
        for ranks in zip(*by_rank, strict=True)
    ]
    report = provenance("layer") | {"rows": rows}
    print(table_of([report]))
    emit(report, output)
    return report


def _config(options: Options, sweep: Sweep, transport: str, experts: str) -> EngineConfig:
    """An engine of one sparse layer and next to no vocabulary or cache."""
    most = max(sweep.tokens_per_gpu)
    longest = ModelConfig.from_pretrained(model_folder(options.model)).longest_context
    chosen = replace(
        options,
        all2all_backend=transport,
        moe_backend=experts,
        max_num_batched_tokens=most,
        max_num_seqs=-(-most // longest),
        max_model_len=max(2, min(most, longest)),
        skip_tokenizer_init=True,
        enforce_eager=True,  # the engine's own graphs: the layer gets others
    )
    config = resolve(chosen)
    moe = replace(config.model.moe, layers=(True,))
    model = replace(config.model, num_layers=1, vocab_size=min(VOCAB_SIZE, config.model.vocab_size), moe=moe)
    return replace(config, model=model)


def _run_ranks(orders: Orders) -> list[list[Measured]]:
    """What each rank measured, by rank.

    Raises:
        HocketError: a rank failed, or took longer than LIMIT_S; its last line of standard error, and all are ended.
    """
    with tempfile.TemporaryDirectory(prefix="hocket-layer-") as folder, _records(folder, orders.world_size):
        Path(folder, "orders").write_bytes(msgspec.msgpack.encode(orders))
        command = [sys.executable, "-P", "-m", "hocket.bench.layer_rank", folder]
        processes = []
        try:
            for rank in range(orders.world_size):
                with Path(folder, f"errors-{rank}").open("w") as errors:
                    processes.append(subprocess.Popen([*command, str(rank)], env=rank_environment(), stderr=errors))
            _wait(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        decoder = msgspec.msgpack.Decoder(list[Measured])
        return [decoder.decode(Path(folder, f"rank-{rank}").read_bytes()) for rank in range(orders.world_size)]


@contextmanager
def _records(folder: str, world_size: int) -> Iterator[None]:
    """The memory in which ranks note where they are."""
    records = Records(folder, world_size, create=True)
    try:
        yield
    finally:
        records.close()


def _wait(processes: Sequence[subprocess.Popen[bytes]], folder: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                lines = Path(folder, f"errors-{rank}").read_text(errors="replace").strip().splitlines()
                raise HocketError(f"rank {rank}: {lines[-1] if lines else f'exit code {code}'}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise HocketError(f"the layer took longer than {LIMIT_S:g} s")
        time.sleep(_POLL_S)


def _row(
    ranks: Sequence[Measured], config: EngineConfig, slice_of: Slice | None, rates: Rates | None
) -> dict[str, Any]:
    """Of one pair of backends at one number of tokens: each repeat counts as long as the slowest rank took."""
    first, parallel, moe = ranks[0], config.parallel, config.model.moe
    ep_size, tokens = parallel.expert_parallel_size, first.tokens_per_gpu
    parts = step_parts(config.model, StepShape.decode(tokens, 1), ep_size, config.dtype, is_fp8=first.is_fp8)
    experts = next(part for part in parts if part.name == "experts")
    us = {part: [max(values) for values in zip(*(one.us[part] for one in ranks), strict=True)] for part in PARTS}
    return {
        "layers": 1,
        "dtype": "fp8" if first.is_fp8 else config.dtype,
        "device": config.device,
        "num_ranks": parallel.data_parallel_size,
        "transport": parallel.all2all_backend,
        "link": link_of(config),
        "experts": first.experts,
        "graphs": not first.eager,
        "eager_parts": first.eager,
        "tokens_per_gpu": tokens,
        "rows_per_expert": tokens * ep_size * moe.top_k / moe.num_experts,
        "slice": slice_of and slice_of.as_row(),
        "repeats": len(us["layer"]),
        "floor_us": rates and experts.us(rates),
        "floor": {"bytes": experts.num_bytes, "flops": experts.flops, "of": "the experts' products"},
        **{f"{part}_us": spread(values) for part, values in us.items()},
    }
