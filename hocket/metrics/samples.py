"""Turns what ranks and requests counted into samples of the table's metrics. Knows no format that they are shown in.

Shapes: L sparse layers, E experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hocket.metrics.requests import RankRequests

HOTTEST = 4
"""So many experts of a layer are told."""
ENDS = ("stop", "length", "abort", "error")
Loads = npt.NDArray[np.float32]


class Sample(NamedTuple):
    """labels: the values of the metric's own labels, in order. value: a number, or a histogram's snapshot."""

    name: str
    labels: tuple[str, ...]
    value: float | Mapping[str, Any]


def rank_samples(stats: Mapping[str, Any], *, has_comm_times: bool) -> Iterator[Sample]:
    """Of one rank's counters. has_comm_times: whether its lanes have times."""
    for name, key in _PLAIN.items():
        yield Sample(name, (), stats[key])
    overlap = stats["overlap"]
    for phase, count in stats["phases"].items():
        yield Sample("steps", (phase,), count)
    for phase, by_reason in overlap["reasons"].items():
        for reason, count in by_reason.items():
            yield Sample("overlap_steps", (phase, reason), count)
    for phase, is_split in overlap["last_split"].items():
        yield Sample("overlap_active", (phase,), int(is_split))
    yield Sample("ubatch_tokens", (), overlap["ubatch_sizes"])
    yield Sample("handover_seconds", (), overlap["hand_over_us"] / 1e6)
    yield from _by("graph_steps", stats["graphs"])
    yield from _by("step_seconds", {part: us / 1e6 for part, us in stats["part_us"].items()})
    for kind, comm in overlap["comm"].items():
        yield Sample("comm_bytes", (kind,), comm["bytes"])
        if has_comm_times:
            exposed_us = min(comm["exposed_us"], comm["us"])
            yield Sample("comm_seconds", (kind, "true"), exposed_us / 1e6)
            yield Sample("comm_seconds", (kind, "false"), (comm["us"] - exposed_us) / 1e6)


_PLAIN = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "kv_cache_usage_perc": "kv_usage",
    "prefix_cache_queries": "num_prefix_queries",
    "prefix_cache_hits": "num_prefix_hits",
    "num_preemptions": "num_preemptions",
    "failed_steps": "failed",
    "computed_prompt_tokens": "prompt_tokens",
}
_TIMES = {
    "time_to_first_token_seconds": "first_token_s",
    "inter_token_latency_seconds": "inter_token_s",
    "request_time_per_output_token_seconds": "per_output_token_s",
    "e2e_request_latency_seconds": "end_to_end_s",
    "request_queue_time_seconds": "queue_s",
    "request_prefill_time_seconds": "prefill_s",
    "request_decode_time_seconds": "decode_s",
    "request_inference_time_seconds": "inference_s",
    "request_prompt_tokens": "prompt_sizes",
    "request_generation_tokens": "generation_sizes",
}


def request_samples(sums: RankRequests) -> Iterator[Sample]:
    """Of one rank's requests."""
    yield Sample("known_prompt_tokens", (), sums.known_prompt_tokens)
    yield Sample("prompt_tokens", (), sums.prompt_tokens)
    yield Sample("generation_tokens", (), sums.generation_tokens)
    yield from _by("request_success", dict.fromkeys(ENDS, 0) | sums.ends)
    for name, attribute in _TIMES.items():
        yield Sample(name, (), getattr(sums, attribute).snapshot())


def _by(name: str, counts: Mapping[str, float]) -> Iterator[Sample]:
    for label, count in counts.items():
        yield Sample(name, (label,), count)


def load_samples(answers: Iterable[Mapping[str, Any]], rank_of: Sequence[int] | None) -> Iterator[Sample]:
    """Of the loads that ranks sampled (`worker/expert_load.py`), together: what each expert computes is the sum of what
    the ranks' tokens chose. rank_of: [E] the rank of each expert, None where every rank has all of them."""
    found = [_loads(answer) for answer in answers if answer]
    if not found:
        return
    loads: Loads = np.sum(found, axis=0)
    order = np.argsort(-loads, axis=1, kind="stable")[:, :HOTTEST]
    for layer, (of_experts, hottest) in enumerate(zip(loads, order, strict=True)):
        yield Sample("expert_load", (str(layer), "max"), float(of_experts.max()))
        yield Sample("expert_load", (str(layer), "mean"), float(of_experts.mean()))
        for place, expert in enumerate(hottest.tolist(), 1):
            yield Sample("hottest_expert_load", (str(layer), str(place)), float(of_experts[expert]))
            yield Sample("hottest_expert", (str(layer), str(place)), expert)
        if rank_of is not None and of_experts.sum():
            of_ranks = np.bincount(rank_of, of_experts, minlength=max(rank_of) + 1)
            yield Sample("rank_load_skew", (str(layer),), float(of_ranks.max() / of_ranks.mean()))


def _loads(answer: Mapping[str, Any]) -> Loads:
    """[L, E]"""
    return np.frombuffer(answer["values"], np.float32).reshape(answer["num_layers"], answer["num_experts"])
