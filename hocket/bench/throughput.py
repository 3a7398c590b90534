"""Offline throughput of the whole engine, and where a step's time goes. Knows only the offline front door."""

from __future__ import annotations

import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hocket.bench.attached import Attached, recording
from hocket.bench.report import check_output, emit, link_of, provenance, spread, strategy_of
from hocket.bench.requests import check_fits
from hocket.config.options import Options
from hocket.errors import ConfigError
from hocket.llm import LLM
from hocket.request import SamplingParams
from hocket.worker.laps import PARTS


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is generated: prompts of a file, or random token ids, other ones in each run so that none are cached."""

    num_prompts: int
    input_len: int
    output_len: int
    prompts_file: str | None

    def check(self, llm: LLM) -> None:
        """Raise ConfigError or CapacityError for prompts that the model is too short for."""
        if self.prompts_file is None:
            check_fits(llm.config, "input_len", self.input_len, self.output_len)
        else:
            llm.check(prompt_lines(self.prompts_file))

    def prompts(self, vocab_size: int, seed: int) -> list[Any]:
        if self.prompts_file is None:
            draw = random.Random(seed)
            ids = [[draw.randrange(vocab_size) for _ in range(self.input_len)] for _ in range(self.num_prompts)]
            return [{"prompt_token_ids": row} for row in ids]
        lines = prompt_lines(self.prompts_file)
        return [lines[i % len(lines)] for i in range(self.num_prompts)]


def prompt_lines(path: str) -> list[str]:
    """The lines of a text file that are not empty. Raises ConfigError where there are none."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("prompts_file", path, f"a readable text file ({error})") from None
    if not lines:
        raise ConfigError("prompts_file", path, "at least one line that is not empty")
    return lines


def run(
    options: Options, work: Workload, *, repeats: int, output: str | None, attached: Attached | None = None
) -> dict[str, Any]:
    """Measure `repeats` runs after one to warm up; print a table and, last, the result as JSON.

    Prompts of a file are the same in every run: with prefix caching they are re-used (`cached_prompt_tokens`).
    attached: one more run, which is not measured, is recorded.
    """
    check_output(output)
    with LLM.from_options(options, progress=True, check=work.check) as llm:
        vocab_size = llm.config.model.vocab_size
        params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True)
        runs = [_one_run(llm, work.prompts(vocab_size, seed), params) for seed in range(repeats + 1)][1:]
        if attached is not None:
            with recording(llm, attached, "the first steps of a run of bench throughput"):
                llm.generate(work.prompts(vocab_size, repeats + 1), params)
        report = provenance("throughput") | {"rows": [_row(options, work, runs) | _setting(llm)]}
    _print_table(report["rows"][0])
    emit(report, output)
    return report


def _one_run(llm: LLM, prompts: list[Any], params: SamplingParams) -> dict[str, Any]:
    llm.stats(reset=True)
    started = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    generated = sum(len(r.outputs[0].token_ids) for r in results)
    prompt_tokens = sum(len(r.prompt_token_ids) for r in results)
    cached = sum(r.num_cached_tokens or 0 for r in results)
    return {
        "requests_per_s": len(results) / seconds,
        "output_tokens_per_s": generated / seconds,
        "total_tokens_per_s": (generated + prompt_tokens) / seconds,
        "cached_prompt_tokens": cached,
        "ranks": llm.stats(),
    }


def _row(options: Options, work: Workload, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the runs; step times are each rank's medians over its steps, then the median over ranks and runs."""
    ranks = [rank for one in runs for rank in one["ranks"]]
    parts = {part: spread([rank["times_us"][part]["median"] for rank in ranks]) for part in PARTS}
    shares = [_share_outside_forward(rank) for rank in ranks]
    return {
        "model": options.model,
        "workload": asdict(work),
        "repeats": len(runs),
        "requests_per_s": spread([one["requests_per_s"] for one in runs]),
        "output_tokens_per_s": spread([one["output_tokens_per_s"] for one in runs]),
        "total_tokens_per_s": spread([one["total_tokens_per_s"] for one in runs]),
        "cached_prompt_tokens": max(one["cached_prompt_tokens"] for one in runs),
        "step_us": spread([rank["step_us"]["median"] for rank in ranks]),
        "parts_us": parts,
        "share_outside_forward": spread(shares),
        "split": [runs[0]["ranks"][0]["overlap"]["split"], runs[0]["ranks"][0]["overlap"]["forwards"]],
        "steps_per_run": statistics.median(rank["steps"] for rank in ranks),
    }


def _setting(llm: LLM) -> dict[str, Any]:
    """What the figures were measured with."""
    config, rank = llm.config, llm.ranks[0]
    return {
        "dtype": config.dtype,
        "device": config.device,
        "num_ranks": len(llm.ranks),
        "parallel": asdict(config.parallel),
        "overlap": asdict(config.overlap),
        "strategy": strategy_of(config),
        "link": link_of(config),
        "transport": config.parallel.all2all_backend,
        "attention": rank["attention_backend"],
        "experts": rank["moe_backend"],
    }


def _share_outside_forward(rank: dict[str, Any]) -> float:
    """Share of this rank's step time, over all steps, that is neither the forward nor waiting for a later rank."""
    sums = {part: rank["times_us"][part]["sum"] for part in PARTS}
    busy = sum(sums.values()) - sums["wait"]
    return 1.0 - sums["forward"] / busy if busy else 0.0


def _print_table(row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"throughput: {row['model']}, median of {row['repeats']} runs [smallest – largest]")
    table.add_column("what")
    table.add_column("median", justify="right")
    table.add_column("range", justify="right")
    for name, label in (
        ("requests_per_s", "requests/s"),
        ("output_tokens_per_s", "output tokens/s"),
        ("total_tokens_per_s", "total tokens/s"),
        ("step_us", "step, µs"),
    ):
        _add(table, label, row[name], 1)
    for part in PARTS:
        _add(table, f"  {part}, µs", row["parts_us"][part], 0)
    percent = {name: 100 * share for name, share in row["share_outside_forward"].items()}
    _add(table, "share outside forward, without wait, %", percent, 1)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)


def _add(table: Any, label: str, values: dict[str, float], digits: int) -> None:
    ends = f"{values['min']:,.{digits}f} – {values['max']:,.{digits}f}"
    table.add_row(label, f"{values['median']:,.{digits}f}", ends)
