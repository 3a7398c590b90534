"""Every metric's name, kind, labels and meaning, once: what is shown, the documentation and the tests read this table.

The names that users of vLLM scrape are the same here but for the prefix. Knows no values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hocket.errors import ConfigError

NAMES = ("hocket", "vllm")
"""Prefixes that the common metrics may have."""
ALWAYS = ("model_name", "engine")
"""Labels of every metric; engine: the rank. Where a metric is of all ranks together, engine is "all"."""
Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """name: without prefix, and without the `_total` that a counter is shown with. labels: besides ALWAYS.
    is_common: vLLM has it too."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    is_common: bool = False

    def full_name(self, names: str = NAMES[0]) -> str:
        """With its prefix. names: one of NAMES."""
        return f"{names if self.is_common else NAMES[0]}:{self.name}"

    def series(self, names: str = NAMES[0]) -> tuple[str, ...]:
        """What its samples are called."""
        full = self.full_name(names)
        if self.kind == "histogram":
            return f"{full}_bucket", f"{full}_sum", f"{full}_count"
        return (f"{full}_total" if self.kind == "counter" else full,)


def _gauge(name: str, help: str, *labels: str, is_common: bool = False) -> Metric:
    return Metric(name, "gauge", help, labels, is_common)


def _counter(name: str, help: str, *labels: str, is_common: bool = False) -> Metric:
    return Metric(name, "counter", help, labels, is_common)


def _histogram(name: str, help: str, *labels: str, is_common: bool = False) -> Metric:
    return Metric(name, "histogram", help, labels, is_common)


COMMON = (
    _gauge("num_requests_running", "requests in the running batch", is_common=True),
    _gauge("num_requests_waiting", "requests on the rank that are not running", is_common=True),
    _gauge("kv_cache_usage_perc", "share of the KV cache's blocks that requests own, 0 to 1", is_common=True),
    _counter("prefix_cache_queries", "prompt tokens looked up in the prefix cache", is_common=True),
    _counter("prefix_cache_hits", "prompt tokens found in the prefix cache", is_common=True),
    _counter("num_preemptions", "requests put back to be computed again", is_common=True),
    _counter("prompt_tokens", "prompt tokens of requests that had their first token, cached ones too", is_common=True),
    _counter("generation_tokens", "tokens generated", is_common=True),
    _counter("request_success", "requests over: stop, length, abort, error", "finished_reason", is_common=True),
    _histogram("time_to_first_token_seconds", "from a request's arrival to its first token", is_common=True),
    _histogram("inter_token_latency_seconds", "from one token of a request to the next", is_common=True),
    _histogram("request_time_per_output_token_seconds", "the same, mean of a request", is_common=True),
    _histogram("e2e_request_latency_seconds", "from a request's arrival to its end", is_common=True),
    _histogram("request_queue_time_seconds", "on its rank until first scheduled", is_common=True),
    _histogram("request_prefill_time_seconds", "from first scheduled to the first token", is_common=True),
    _histogram("request_decode_time_seconds", "from the first token to the last", is_common=True),
    _histogram("request_inference_time_seconds", "from first scheduled to the last token", is_common=True),
    _histogram("request_prompt_tokens", "prompt tokens of a request", is_common=True),
    _histogram("request_generation_tokens", "tokens generated for a request", is_common=True),
)
OWN = (
    _counter(
        "known_prompt_tokens",
        "prompt tokens thought to be in the rank's prefix cache when it was sent their requests",
    ),
    _counter("steps", "steps of the rank, by what its own batch was", "phase"),
    _counter("failed_steps", "steps whose results were worthless, here or on another rank"),
    _counter("overlap_steps", "steps by phase and by why they were split or not", "phase", "reason"),
    _gauge("overlap_active", "1: the last step of the phase was split", "phase"),
    _histogram("ubatch_tokens", "this rank's tokens of each ubatch of the steps that were split"),
    _counter("graph_steps", "steps by whether they ran in a CUDA graph, or why not", "reason"),
    _counter("step_seconds", "where the time of steps went; wait: for ranks that came later", "part"),
    _counter("computed_prompt_tokens", "prompt tokens computed: not cached ones, preempted ones again"),
    _counter("comm_seconds", "time of transfers; exposed: compute stood still for it. Not on GPUs", "kind", "exposed"),
    _counter("comm_bytes", "bytes sent to other ranks (DeepEP: if routing is even); not those of CUDA graphs", "kind"),
    _counter("handover_seconds", "from one ubatch's last work to the next one's first, on the host"),
    _gauge("expert_load", "choices of an expert in a step, recent; the max or mean of all experts", "layer", "stat"),
    _gauge("hottest_expert_load", "the same of the most chosen experts, place 1 first", "layer", "place"),
    _gauge("hottest_expert", "which experts those are", "layer", "place"),
    _gauge("rank_load_skew", "choices of the most loaded rank's experts / mean over the ranks; 1: even", "layer"),
)
METRICS = {metric.name: metric for metric in (*COMMON, *OWN)}


def check_names(names: str) -> str:
    """`names` if it is one of NAMES. Raises ConfigError."""
    if names not in NAMES:
        raise ConfigError("metrics_names", names, ", ".join(NAMES))
    return names
