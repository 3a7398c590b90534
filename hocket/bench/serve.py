"""Load on running servers, as users would see it: requests come at a rate, whatever became of those before. Knows only
OpenAI's API."""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hocket.bench.http_client import Server, Streamed
from hocket.bench.report import check_output, emit, provenance
from hocket.bench.throughput import prompt_lines
from hocket.errors import ConfigError, HocketError
from hocket.progress import Bar

TIMES = {"ttft_ms": "first token", "tpot_ms": "per token after", "itl_ms": "between tokens", "e2e_ms": "whole answer"}
"""By what is measured, in milliseconds: how it is shown."""
ARRIVALS = ("poisson", "fixed")


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked. request_rate: requests a second (None: all at once), arriving at random (Poisson) or evenly.
    max_concurrency: a request that would be one too many waits, and its times count from when it is sent."""

    num_prompts: int
    input_len: int
    output_len: int
    request_rate: float | None
    arrivals: str
    max_concurrency: int | None
    prompts_file: str | None
    vocab_size: int
    chat: bool
    ignore_eos: bool
    temperature: float
    model: str | None

    def __post_init__(self) -> None:
        if self.arrivals not in ARRIVALS:
            raise ConfigError("arrivals", self.arrivals, " or ".join(ARRIVALS))
        if self.chat and self.prompts_file is None:
            raise ConfigError("chat", True, "a --prompts-file beside it: random token ids are no messages")

    def bodies(self, seed: int) -> list[dict[str, Any]]:
        """The requests of a run; other random prompts for each seed, so that none are cached."""
        more: dict[str, Any] = {"max_tokens": self.output_len, "temperature": self.temperature, "stream": True}
        more |= {"stream_options": {"include_usage": True}}
        more |= {"ignore_eos": True} if self.ignore_eos else {}
        more |= {"model": self.model} if self.model else {}
        if self.prompts_file is None:
            draw = random.Random(seed)
            ids = [draw.choices(range(self.vocab_size), k=self.input_len) for _ in range(self.num_prompts)]
            return [{"prompt": row} | more for row in ids]
        lines = prompt_lines(self.prompts_file)
        texts = [lines[i % len(lines)] for i in range(self.num_prompts)]
        if self.chat:
            return [{"messages": [{"role": "user", "content": text}]} | more for text in texts]
        return [{"prompt": text} | more for text in texts]

    def starts(self, seed: int) -> list[float]:
        """When each request is sent, in seconds from the beginning."""
        if self.request_rate is None:
            return [0.0] * self.num_prompts
        if self.arrivals == "fixed":
            return [i / self.request_rate for i in range(self.num_prompts)]
        draw, at, starts = random.Random(f"{seed}/arrivals"), 0.0, []
        for _ in range(self.num_prompts):
            starts.append(at)
            at += draw.expovariate(self.request_rate)
        return starts


@dataclass(frozen=True)
class Run:
    """The answers of a run, and how long it took."""

    answers: list[Streamed]
    seconds: float


def run(servers: Sequence[Server], load: Load, *, repeats: int, output: str | None) -> dict[str, Any]:
    """Load each server in turn, `repeats` times, after a request to each that is not counted; print a table and, last,
    the result as JSON.

    Raises:
        HocketError: a server does not answer at all.
    """
    check_output(output)
    runs: list[list[Run]] = [[] for _ in servers]
    total = repeats * len(servers) * load.num_prompts
    with Bar("asking") as bar:
        for server in servers:
            _try(server, load)
        for repeat in range(repeats):
            for number, server in enumerate(servers):
                done = (repeat * len(servers) + number) * load.num_prompts
                progress = lambda n, before=done: bar.update(before + n, total)  # noqa: E731
                runs[number].append(asyncio.run(_one_run(server, load, repeat, progress)))
    rows = [_row(server, load, of_server) for server, of_server in zip(servers, runs, strict=True)]
    report = provenance("serve") | {"rows": rows}
    for row in rows:
        _print_table(row)
    emit(report, output)
    return report


def _path(load: Load) -> str:
    return "/v1/chat/completions" if load.chat else "/v1/completions"


def _try(server: Server, load: Load) -> None:
    answer = asyncio.run(server.stream(_path(load), load.bodies(-1)[0]))
    if answer.error:
        raise HocketError(f"{server.url}: {answer.error}")


async def _one_run(server: Server, load: Load, seed: int, progress: Callable[[int], None]) -> Run:
    gate = asyncio.Semaphore(load.max_concurrency or load.num_prompts)
    began = time.perf_counter()
    num_done = 0

    async def ask(body: dict[str, Any], start: float) -> Streamed:
        nonlocal num_done
        await asyncio.sleep(began + start - time.perf_counter())
        async with gate:
            answer = await server.stream(_path(load), body)
        num_done += 1
        progress(num_done)
        return answer

    asked = [ask(body, start) for body, start in zip(load.bodies(seed), load.starts(seed), strict=True)]
    answers = await asyncio.gather(*asked)
    return Run(answers, time.perf_counter() - began)


def _row(server: Server, load: Load, runs: list[Run]) -> dict[str, Any]:
    """Times over all answers of all runs; rates as medians over the runs. runs: rates of each, and medians of times.
    num_short: answers with fewer tokens than were asked for, although they were not to end before."""
    answers = [answer for one in runs for answer in one.answers]
    good = [answer for answer in answers if not answer.error]
    errors = dict.fromkeys(answer.error for answer in answers if answer.error)
    rates: dict[str, list[float]] = {"requests_per_s": [], "output_tokens_per_s": [], "total_tokens_per_s": []}
    for one in runs:
        ended = [answer for answer in one.answers if not answer.error]
        generated = sum(answer.num_tokens for answer in ended)
        rates["requests_per_s"].append(len(ended) / one.seconds)
        rates["output_tokens_per_s"].append(generated / one.seconds)
        rates["total_tokens_per_s"].append((generated + sum(a.num_prompt_tokens for a in ended)) / one.seconds)
    return {
        "url": server.url,
        "load": asdict(load),
        "repeats": len(runs),
        "num_answers": len(good),
        "num_failed": len(answers) - len(good),
        "num_short": sum(answer.num_tokens < load.output_len for answer in good) if load.ignore_eos else None,
        "tokens_per_answer": statistics.fmean(answer.num_tokens for answer in good) if good else None,
        "errors": list(errors)[:5],
        "seconds": statistics.median(one.seconds for one in runs),
        **{name: statistics.median(values) for name, values in rates.items()},
        **{name: _spread(values) for name, values in times(good).items()},
        "runs": {**rates, **{name: [_median_ms(one, name) for one in runs] for name in TIMES}},
    }


def _median_ms(run: Run, name: str) -> float | None:
    """None where no answer of the run has such a time."""
    values = times([answer for answer in run.answers if not answer.error])[name]
    return statistics.median(values) if values else None


def times(answers: Sequence[Streamed]) -> dict[str, list[float]]:
    """In milliseconds, by the names of TIMES. An event may bring several tokens: what is between events counts once."""
    found: dict[str, list[float]] = {name: [] for name in TIMES}
    for answer in answers:
        first, last = answer.times[0], answer.times[-1]
        found["ttft_ms"].append(1e3 * (first - answer.sent))
        found["e2e_ms"].append(1e3 * (last - answer.sent))
        found["itl_ms"] += [1e3 * (later - earlier) for earlier, later in pairwise(answer.times)]
        if answer.num_tokens > 1:
            found["tpot_ms"].append(1e3 * (last - first) / (answer.num_tokens - 1))
    return found


def _spread(values: list[float]) -> dict[str, float] | None:
    """None where there are none."""
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"mean": statistics.fmean(values), "median": statistics.median(values), "p99": p99, "max": ordered[-1]}


def _print_table(row: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    load = row["load"]
    rate = "all at once" if load["request_rate"] is None else f"{load['request_rate']:g} requests/s, {load['arrivals']}"
    failed = f", {row['num_failed']} FAILED" if row["num_failed"] else ""
    table = Table(title=f"{row['url']}: {row['num_answers']} answers{failed}; {rate}")
    for name in ("milliseconds", "mean", "median", "p99", "largest"):
        table.add_column(name, justify="left" if name == "milliseconds" else "right")
    for name, label in TIMES.items():
        values = row[name] or {}
        shown = [f"{values[key]:,.2f}" if key in values else "–" for key in ("mean", "median", "p99", "max")]
        table.add_row(f"{label} ({name[:-3].upper()})", *shown)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    per_user = f"; each user {1e3 / row['tpot_ms']['median']:,.1f} tokens/s" if row["tpot_ms"] else ""
    console.print(
        f"{row['requests_per_s']:,.2f} requests/s, {row['output_tokens_per_s']:,.1f} output tokens/s, "
        f"{row['total_tokens_per_s']:,.1f} with prompts (median of {row['repeats']} runs){per_user}"
    )
    if row["num_short"]:
        console.print(
            f"{row['num_short']} of {row['num_answers']} answers are shorter than --output-len {load['output_len']}: "
            f"{row['tokens_per_answer']:,.0f} tokens on average, as many as the server allows?"
        )
    for error in row["errors"]:
        console.print(f"failed: {error}", markup=False, highlight=False)
