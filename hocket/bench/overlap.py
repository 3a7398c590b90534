"""Overlap off against dual batch over an emulated link, on the same ranks. Knows only the offline front door.

The link is emulated (real transfers are stretched to a bandwidth), so figures say what overlap does with a link of
that kind, not how fast this machine's own is.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from hocket.bench.report import check_output, emit, provenance, spread
from hocket.bench.requests import check_fits
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.dist.launcher import RankGroup
from hocket.envs import FORCE_SPLIT
from hocket.errors import ConfigError
from hocket.llm import LLM
from hocket.request import SamplingParams

WARM_UP_PROMPTS, WARM_UP_TOKENS = 4, 8
CALIBRATION_RUNS = 3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Random prompts, each rank its share, of which only first tokens are generated: steps are prefills."""

    prompt_len: int
    prompts_per_rank: int

    def prompts(self, num_ranks: int, vocab_size: int, seed: int) -> list[Any]:
        draw = random.Random(seed)
        return [
            {"prompt_token_ids": [draw.randrange(vocab_size) for _ in range(self.prompt_len)]}
            for _ in range(self.prompts_per_rank * num_ranks)
        ]


def run(options: Options, work: Workload, *, repeats: int, output: str | None) -> dict[str, Any]:
    """Measure off and on in turn, `repeats` times; print figures and, last, JSON.

    Needs ranks that share experts. Without `emulate_link_gb_per_s` the bandwidth is chosen so that the link
    takes about as long as compute does: bytes sent per step over compute time per step, both measured without a link.
    """
    check_output(output)
    check_ranks(options, "in hocket bench overlap")
    off = _off(options, work)
    on = replace(off, ubatch_size=options.ubatch_size, enable_dbo=options.enable_dbo or options.ubatch_size < 2)
    config = resolve(on)
    check_fits(config, "prompt_len", work.prompt_len, WARM_UP_TOKENS)
    with _ranks(off) as group:
        compute_us, step_bytes = _calibrate(
            replace(off, emulate_link_gb_per_s=None, emulate_link_latency_us=0.0), work, group
        )
        found = options.emulate_link_gb_per_s is None
        latency_us = 2 * sum(config.model.moe.layers) * off.emulate_link_latency_us  # a dispatch and a combine each
        gb_per_s = options.emulate_link_gb_per_s or step_bytes / max(compute_us - latency_us, 0.1 * compute_us) / 1e3
        runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
        for _ in range(repeats):
            for name, chosen in (("off", off), ("on", on)):
                runs[name].append(_measure(replace(chosen, emulate_link_gb_per_s=gb_per_s), work, group))
    row: dict[str, Any] = {
        "model": options.model,
        "workload": asdict(work),
        "repeats": repeats,
        "num_ranks": off.data_parallel_size,
        "num_ubatches": config.overlap.num_ubatches,
        "executor": config.overlap.executor,
        "transport": config.parallel.all2all_backend,
        "dtype": config.dtype,
        "link": {
            "emulated": True,
            "gb_per_s": gb_per_s,
            "latency_us": off.emulate_link_latency_us,
            "chosen_to_equal_compute": found,
        },
        "compute_ms": compute_us / 1e3,
        "link_ms": (step_bytes / gb_per_s / 1e3 + latency_us) / 1e3,
        "bytes_per_step": step_bytes,
        "step_ratio": _ratio(runs),
        "same_tokens": len({str(one["token_ids"]) for ones in runs.values() for one in ones}) == 1,
        **{name: _summary(ones) for name, ones in runs.items()},
    }
    _print(row)
    report = provenance("overlap") | {"rows": [row]}
    emit(report, output)
    return report


def check_ranks(options: Options, where: str) -> None:
    """Refuse, in the user's own terms, what has no communication that could overlap. `where`: for whom."""
    if options.data_parallel_size < 2:
        raise ConfigError("data_parallel_size", options.data_parallel_size, "at least 2", where=where)
    if not options.enable_expert_parallel:
        raise ConfigError("enable_expert_parallel", False, "true", where=where)


def _off(options: Options, work: Workload) -> Options:
    """The engine without overlap, in which a step holds one prompt unless the options say otherwise."""
    off = replace(
        options,
        enable_dbo=False,
        ubatch_size=0,
        max_num_batched_tokens=options.max_num_batched_tokens or work.prompt_len,
        max_num_seqs=options.max_num_seqs or min(work.prompt_len, work.prompts_per_rank + WARM_UP_PROMPTS),
        skip_tokenizer_init=True,
    )
    refuse_forced_split(off, "where overlap must be off for half of the runs")
    return off


def refuse_forced_split(off: Options, where: str) -> None:
    """Raise ConfigError if steps would be split with these options, which say that overlap is off."""
    if resolve(off).overlap.num_ubatches > 1:
        raise ConfigError(FORCE_SPLIT.name, FORCE_SPLIT.get(), "unset", where=where)


@contextmanager
def _ranks(options: Options) -> Iterator[RankGroup]:
    group = RankGroup.start(options.data_parallel_size, options.startup_timeout)
    try:
        yield group
    finally:
        group.close()


def _calibrate(options: Options, work: Workload, group: RankGroup) -> tuple[float, float]:
    """(µs of compute, bytes sent) of a step on a rank without the emulated link, mean over ranks."""
    with LLM.from_options(options, group=group) as llm:
        _warm_up(llm, work)
        runs = [_one_run(llm, work, seed) for seed in range(CALIBRATION_RUNS)]
    compute = statistics.median(one["forward_ms"] - one["comm_ms"] for one in runs) * 1e3
    return max(compute, 1.0), runs[0]["bytes"]


def _measure(options: Options, work: Workload, group: RankGroup) -> dict[str, Any]:
    """One run on an engine of its own; its token ids include those of the warm-up, which also decodes."""
    with LLM.from_options(options, group=group) as llm:
        first = _warm_up(llm, work)
        found = _one_run(llm, work, seed=0)
    found["token_ids"] += first
    return found


def _warm_up(llm: LLM, work: Workload) -> list[list[int]]:
    few = replace(work, prompts_per_rank=min(WARM_UP_PROMPTS, work.prompts_per_rank))
    return _generate(llm, few, seed=-1, num_tokens=WARM_UP_TOKENS)


def _generate(llm: LLM, work: Workload, seed: int, num_tokens: int) -> list[list[int]]:
    num_ranks = llm.config.parallel.data_parallel_size
    prompts = work.prompts(num_ranks, llm.config.model.vocab_size, seed)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    ranks = [i % num_ranks for i in range(len(prompts))]
    results = llm.generate(prompts, params, use_tqdm=False, data_parallel_rank=ranks)
    return [result.outputs[0].token_ids for result in results]


def _one_run(llm: LLM, work: Workload, seed: int) -> dict[str, Any]:
    """Figures per step are means over the steps of all ranks."""
    llm.stats(reset=True)
    started = time.perf_counter()
    token_ids = _generate(llm, work, seed, num_tokens=1)
    seconds = time.perf_counter() - started
    ranks = llm.stats()
    steps = sum(rank["overlap"]["forwards"] for rank in ranks)
    return {
        "token_ids": token_ids,
        "tokens_per_s": len(token_ids) * (work.prompt_len + 1) / seconds,
        "steps": ranks[0]["overlap"]["forwards"],
        "split": ranks[0]["overlap"]["split"],
        "step_ms": sum(rank["step_us"]["sum"] for rank in ranks) / steps / 1e3,
        "forward_ms": sum(rank["times_us"]["forward"]["sum"] for rank in ranks) / steps / 1e3,
        "comm_ms": sum(rank["overlap"]["comm_us"] for rank in ranks) / steps / 1e3,
        "exposed_ms": sum(rank["overlap"]["exposed_comm_us"] for rank in ranks) / steps / 1e3,
        "bytes": sum(rank["overlap"]["comm_bytes"] for rank in ranks) / steps,
    }


def _ratio(runs: dict[str, list[dict[str, Any]]]) -> dict[str, float] | None:
    """A step with overlap over one without, run by run; None where some step was not split: nothing is compared."""
    if any(one["split"] < one["steps"] for one in runs["on"]):
        return None
    return spread([on["step_ms"] / off["step_ms"] for off, on in zip(runs["off"], runs["on"], strict=True)])


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("tokens_per_s", "step_ms", "comm_ms", "exposed_ms")
    return {name: spread([one[name] for one in runs]) for name in names} | {
        "steps": runs[0]["steps"],
        "split": min(one["split"] for one in runs),
    }


def _print(row: dict[str, Any]) -> None:
    link = row["link"]
    how = "chosen so that it takes as long as compute" if link["chosen_to_equal_compute"] else "as given"
    print(
        f"{row['model']} on {row['num_ranks']} ranks, prompts of {row['workload']['prompt_len']} tokens; "
        f"the link is EMULATED: {link['gb_per_s']:.4f} GB/s, {link['latency_us']:g} µs, {how}\n"
        f"per step and rank: compute {row['compute_ms']:.1f} ms, link {row['link_ms']:.1f} ms "
        f"for {row['bytes_per_step'] / 1e6:.2f} MB; median of {row['repeats']} runs each, in turn [least – most]"
    )
    for name, label in (("off", "overlap off"), ("on", f"{row['num_ubatches']} ubatches")):
        one = row[name]
        print(
            f"{label:>12}: {_range(one['tokens_per_s'], 0)} tokens/s, step {_range(one['step_ms'])} ms, "
            f"split {one['split']}/{one['steps']} steps, "
            f"exposed comm {_range(one['exposed_ms'])} of {one['comm_ms']['median']:,.1f} ms/step"
        )
    if row["step_ratio"] is None:
        print("no comparison: not all steps were split; see --prompt-len and --dbo-prefill-token-threshold")
    else:
        print(f"step with overlap / step without: {_range(row['step_ratio'], 2)}")
    print(f"same tokens: {'yes' if row['same_tokens'] else 'NO'}")


def _range(values: dict[str, float], digits: int = 1) -> str:
    return f"{values['median']:,.{digits}f} [{values['min']:,.{digits}f} – {values['max']:,.{digits}f}]"
