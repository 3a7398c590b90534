"""What /metrics says of requests, ranks and experts, from events and counters that are known."""

from __future__ import annotations

import asyncio
import math
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from metrics_text import Shown
from test_step_log import plan_of, record_of

from hocket.config.engine import EngineConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import BackendUnavailable, ConfigError, RankLost
from hocket.metrics.histogram import Histogram, cumulative
from hocket.metrics.requests import RequestTimes
from hocket.metrics.samples import HOTTEST, load_samples
from hocket.metrics.show import Metrics
from hocket.metrics.table import METRICS, NAMES
from hocket.outputs import TokenOutput
from hocket.request import EngineRequest, SamplingParams
from hocket.ubatch.times import StepTimes, Traffic
from hocket.worker.stats import KINDS, StepStats

SCHEDULER = {
    "num_running": 3,
    "num_waiting": 2,
    "num_preemptions": 1,
    "num_prefix_queries": 80,
    "num_prefix_hits": 20,
    "kv_usage": 0.25,
}


def config(**options: Any) -> EngineConfig:
    return resolve(Options.from_dict({"data_parallel_size": 2, "enable_expert_parallel": True} | options))


def request(name: str, prompt: int) -> EngineRequest:
    return EngineRequest(name, [1] * prompt, SamplingParams())


def stats_of(rank: int, expert_load: dict[str, Any] | None = None) -> dict[str, Any]:
    """What a rank would answer after a step of decodes and one without work."""
    stats = StepStats()
    stats.count_step(record_of(plan_of(8, 8), 8))
    stats.count_step(record_of(plan_of(0, 0), 0, "idle"))
    return {"rank": rank} | stats.totals() | SCHEDULER | {"expert_load": expert_load or {}}


def test_a_value_on_a_bound_is_below_it() -> None:
    found = Histogram((1, 2, 4))
    for value in (0, 1, 1.5, 2, 4, 5):
        found.add(value)
    assert cumulative(found.snapshot()) == [(1, 2), (2, 4), (4, 5), (math.inf, 6)]
    assert found.snapshot()["total"] == 13.5


def test_a_requests_times() -> None:
    """Arrives at 10, waits 0.5 s on its rank, tokens at 12, 12.25 and 13; the other one is aborted."""
    times = RequestTimes(range(2))
    times.added(1, request("a", 7), 10.0, 0)
    times.added(1, request("b", 5), 10.0, 0)
    times.gained(TokenOutput("a", [], queue_s=0.0), 11.0)  # no token: nothing was gained
    times.gained(TokenOutput("a", [4], queue_s=0.5), 12.0)
    times.gained(TokenOutput("a", [5]), 12.25)
    times.gained(TokenOutput("b", [5], queue_s=3.0), 12.5)
    times.gained(TokenOutput("a", [6]), 13.0)
    times.ended("a", "length", 13.5)
    times.ended("b", "abort", 14.0)
    for late in ("a", "b", "unknown"):
        times.gained(TokenOutput(late, [6]), 15.0)
        times.ended(late, "stop", 15.0)
    idle, sums = times.ranks.values()
    assert (idle.ends, idle.prompt_tokens, sum(idle.first_token_s.counts)) == ({}, 0, 0)
    assert sums.ends == {"length": 1, "abort": 1}
    assert (sums.prompt_tokens, sums.generation_tokens) == (12, 4)
    assert (sums.first_token_s.total, sum(sums.first_token_s.counts)) == (4.5, 2)
    assert (sums.inter_token_s.total, sum(sums.inter_token_s.counts)) == (1.0, 2)
    expected = {"end_to_end_s": 3.5, "queue_s": 0.5, "prefill_s": 1.5, "decode_s": 1.0, "inference_s": 2.5}
    expected |= {"per_output_token_s": 0.5, "prompt_sizes": 7, "generation_sizes": 3}
    for name, total in expected.items():
        found = getattr(sums, name)
        assert (found.total, sum(found.counts)) == (total, 1), name


@pytest.mark.parametrize("names", NAMES)
def test_every_metric_is_shown_under_its_name(names: str) -> None:
    metrics = Metrics(config(), "my model", names)
    assert metrics.content_type.startswith("text/plain")
    metrics.added(0, request("a", 7), 10.0, 0)
    metrics.gained(TokenOutput("a", [4], queue_s=0.5), 12.0)
    num_experts = config().model.moe.num_experts
    loads = np.arange(2 * num_experts, dtype=np.float32)
    for rank in (0, 1):
        metrics.counted(stats_of(rank, {"num_layers": 2, "num_experts": num_experts, "values": loads.tobytes()}))
    shown = Shown(metrics.render())
    assert shown.names == {series for metric in METRICS.values() for series in metric.series(names)}
    assert {sample.labels["model_name"] for sample in shown.samples} == {"my model"}
    for metric in METRICS.values():
        family = shown.families[metric.full_name(names)]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        for sample in family.samples:
            assert {*sample.labels} - {"le"} == {"model_name", "engine", *metric.labels}
    prefix = "vllm" if names == "vllm" else "hocket"
    assert shown.values(f"{prefix}:num_requests_running") == {("0",): 3, ("1",): 3}
    assert shown.values(f"{prefix}:prefix_cache_hits_total", engine="1") == {(): 20}
    assert shown.values(f"{prefix}:time_to_first_token_seconds_sum") == {("0",): 2.0, ("1",): 0.0}
    assert shown.values("hocket:overlap_steps_total", engine="0") == {("decode", "split"): 1, ("idle", "no_work"): 1}
    assert shown.values("hocket:overlap_active") == {("0", "decode"): 1, ("1", "decode"): 1}
    comm = {("dispatch", "true"): 0.0005, ("dispatch", "false"): 0.001, ("combine", "true"): 0.0}
    assert shown.values("hocket:comm_seconds_total", engine="1") == {
        (exposed, kind): seconds for (kind, exposed), seconds in (comm | {("combine", "false"): 0.0005}).items()
    }
    assert shown.values("hocket:comm_bytes_total", engine="1") == {("dispatch",): 30, ("combine",): 20}
    assert shown.values("hocket:handover_seconds_total") == {("0",): 4e-5, ("1",): 4e-5}
    assert shown.values("hocket:ubatch_tokens_sum") == {("0",): 8, ("1",): 8}


def test_gpus_have_no_times_of_transfers() -> None:
    metrics = Metrics(replace(config(), device="cuda"), "tiny")
    metrics.counted(stats_of(0))
    names = Shown(metrics.render()).names
    assert "hocket:comm_bytes_total" in names
    assert "hocket:comm_seconds_total" not in names, "a 0 would look like hidden communication"


def test_the_load_of_experts_is_that_of_all_ranks() -> None:
    """6 experts, the first three on rank 0; two ranks' tokens."""
    first = np.array([[1, 0, 2, 0, 0, 1]], dtype=np.float32)
    second = np.array([[0, 0, 3, 1, 0, 0]], dtype=np.float32)
    answers = [{"num_layers": 1, "num_experts": 6, "values": one.tobytes()} for one in (first, second)]
    found = {(one.name, one.labels): one.value for one in load_samples([*answers, {}], [0, 0, 0, 1, 1, 1])}
    assert found["expert_load", ("0", "max")] == 5
    assert found["expert_load", ("0", "mean")] == pytest.approx(8 / 6)
    assert [found["hottest_expert", ("0", str(place))] for place in range(1, HOTTEST + 1)] == [2, 0, 3, 5]
    assert [found["hottest_expert_load", ("0", str(place))] for place in range(1, HOTTEST + 1)] == [5, 1, 1, 1]
    assert found["rank_load_skew", ("0",)] == 6 / 4
    assert not any(one.name == "rank_load_skew" for one in load_samples(answers, None)), "replicas have all experts"
    assert not list(load_samples([{}, {}], None)), "nothing was sampled yet"
    nothing = {"num_layers": 1, "num_experts": 6, "values": np.zeros(6, np.float32).tobytes()}
    assert all(math.isfinite(float(str(one.value))) for one in load_samples([nothing], [0, 0, 0, 1, 1, 1]))


def scrape(metrics: Metrics, *answers: list[int] | Exception, timeout_s: float = 0.05) -> tuple[int, list[Shown]]:
    """How often the ranks were asked, and what each of as many scrapes showed; answers: of whom, to each question."""
    left = iter(answers)
    asked = 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        answer = next(left)
        if isinstance(answer, Exception):
            raise answer
        for rank in answer:
            asyncio.get_running_loop().call_soon(metrics.counted, stats_of(rank))

    async def all_scrapes() -> list[bytes]:
        return [await metrics.scrape(ask, timeout_s) for _ in answers]

    found = asyncio.run(all_scrapes())
    return asked, [Shown(text) for text in found]


def test_a_scrape_waits_for_all_ranks_but_not_for_ever() -> None:
    def engines(shown: Shown) -> set[str]:
        return {*shown.by_engine("hocket:num_requests_running")}

    asked, found = scrape(Metrics(config(), "tiny"), [0, 1], [1], RankLost("gone"), timeout_s=0.05)
    assert asked == 3
    assert [engines(one) for one in found] == [{"0", "1"}] * 3, "what was said last is still there"
    asked, found = scrape(Metrics(config(), "tiny"), [0])
    assert [engines(one) for one in found] == [{"0"}]
    assert found[0].by_engine("hocket:request_success_total") == {"0": 0, "1": 0}


def test_nobody_is_waited_for_where_the_ranks_are_gone() -> None:
    metrics = Metrics(config(), "tiny")

    def ask() -> None:
        raise RankLost("gone")

    async def scrapes() -> None:
        async with asyncio.timeout(10.0):
            for _ in range(2):
                await metrics.scrape(ask, 1000.0)

    asyncio.run(scrapes())


def test_scrapes_at_the_same_time_share_a_question() -> None:
    metrics, asked = Metrics(config(), "tiny"), 0

    def ask() -> None:
        nonlocal asked
        asked += 1
        for rank in (0, 1):
            asyncio.get_running_loop().call_later(0.02, metrics.counted, stats_of(rank))

    async def both() -> list[bytes]:
        return list(await asyncio.gather(*(metrics.scrape(ask, 5.0) for _ in range(3))))

    assert len({*asyncio.run(both())}) == 1
    assert asked == 1


def test_wrong_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="metrics_names: 'sglang' is not allowed"):
        Metrics(config(), "tiny", "sglang")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(BackendUnavailable, match=r"prometheus-client.*hocket\[server\]"):
        Metrics(config(), "tiny")


def test_kinds_are_those_of_the_times() -> None:
    stats = StepStats()
    stats.times = StepTimes(Traffic(1, 2, 3), Traffic(4, 5, 6))
    assert list(stats.totals()["overlap"]["comm"]) == list(KINDS)
    assert stats.totals()["overlap"]["comm"]["combine"] == {"us": 0.004, "exposed_us": 0.005, "bytes": 6}
