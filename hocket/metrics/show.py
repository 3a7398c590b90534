"""What operators scrape: follows requests and ranks, and shows them as Prometheus' text. Knows no HTTP.

Only this module needs prometheus-client, which `pip install 'hocket[server]'` brings.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from hocket.config.engine import EngineConfig
from hocket.errors import BackendUnavailable, HocketError
from hocket.metrics.histogram import cumulative
from hocket.metrics.requests import RequestTimes
from hocket.metrics.samples import Sample, load_samples, rank_samples, request_samples
from hocket.metrics.table import ALWAYS, METRICS, NAMES, Metric, check_names
from hocket.moe.placement import ExpertPlacement

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

SCRAPE_S = 1.0
"""How long a scrape waits for ranks; then it shows what they said last."""
ALL = "all"
"""The `engine` of what is of all ranks together."""


class Metrics(RequestTimes):
    """An `EngineClient`'s listener, whose `render` is what /metrics answers.

        client.listener = metrics = Metrics(client.config, "tiny")
        text = await metrics.scrape(client.ask_counters)  # on the event loop that also calls client.poll or advance

    names: the prefix of what vLLM has too, one of NAMES. ranks: those behind this server (None:
    all). Raises BackendUnavailable without prometheus-client.
    """

    def __init__(
        self, config: EngineConfig, model_name: str, names: str = NAMES[0], ranks: Iterable[int] | None = None
    ) -> None:
        super().__init__(range(config.parallel.data_parallel_size) if ranks is None else ranks)
        self._text = _exposition()
        self.content_type: str = self._text.CONTENT_TYPE_LATEST
        self._names = check_names(names)
        self._model_name = model_name
        self._has_comm_times = config.device == "cpu"
        self._stats: dict[int, dict[str, Any]] = {}
        self._missing: set[int] = set()
        self._all_here = asyncio.Event()
        self._asked_at = -SCRAPE_S
        self._rank_of: tuple[int, ...] | None = None
        parallel = config.parallel
        if parallel.enable_expert_parallel:
            strategy = parallel.expert_placement_strategy
            placed = ExpertPlacement(config.model.moe.num_experts, parallel.expert_parallel_size, strategy)
            self._rank_of = placed.rank_of

    def counted(self, stats: dict[str, Any]) -> None:
        """A rank's answer; see `hocket.client.Listener`."""
        self._stats[stats["rank"]] = stats
        self._missing.discard(stats["rank"])
        if not self._missing:
            self._all_here.set()

    def lost(self, now: float) -> None:
        """The ranks are gone: what they said last is no longer so."""
        super().lost(now)
        self._stats.clear()

    async def scrape(self, ask: Callable[[], None], timeout_s: float = SCRAPE_S) -> bytes:
        """Have the ranks asked (`EngineClient.ask_counters`) and show what they say; after `timeout_s`, and where they
        are gone, what they said last. Scrapes at the same time share one question."""
        now = time.monotonic()
        if not self._missing or now > self._asked_at + timeout_s:
            self._asked_at, self._missing = now, set(self.ranks)
            self._all_here = asyncio.Event()
            try:
                ask()
            except HocketError:  # there is nobody to wait for
                self._missing.clear()
                return self.render()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_here.wait(), timeout_s)
        return self.render()

    def render(self) -> bytes:
        """All metrics as text, as `content_type` says."""
        text: bytes = self._text.generate_latest(self)
        return text

    def collect(self) -> Iterator[Family]:
        """As prometheus-client asks for them."""
        by_name: dict[str, list[tuple[str, Sample]]] = {name: [] for name in METRICS}
        for engine, samples in self._samples():
            for sample in samples:
                by_name[sample.name].append((engine, sample))
        for name, found in by_name.items():
            yield self._family(METRICS[name], found)

    def _samples(self) -> Iterator[tuple[str, Iterable[Sample]]]:
        for rank, sums in self.ranks.items():
            yield str(rank), request_samples(sums)
        for rank, stats in sorted(self._stats.items()):
            yield str(rank), rank_samples(stats, has_comm_times=self._has_comm_times)
        yield ALL, load_samples([stats["expert_load"] for stats in self._stats.values()], self._rank_of)

    def _family(self, metric: Metric, found: list[tuple[str, Sample]]) -> Family:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        name, labels = metric.full_name(self._names), (*ALWAYS, *metric.labels)
        if metric.kind == "histogram":
            family = HistogramMetricFamily(name, metric.help, labels=labels)
            for engine, sample in found:
                assert not isinstance(sample.value, (int, float))
                buckets = [(_text_of(bound), count) for bound, count in cumulative(sample.value)]
                family.add_metric((self._model_name, engine, *sample.labels), buckets, sample.value["total"])
            return family
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        plain: CounterMetricFamily | GaugeMetricFamily = make(name, metric.help, labels=labels)
        for engine, sample in found:
            assert isinstance(sample.value, (int, float))
            plain.add_metric((self._model_name, engine, *sample.labels), sample.value)
        return plain


def _text_of(bound: float) -> str:
    """A bucket's label."""
    return "+Inf" if bound == math.inf else str(float(bound))


def _exposition() -> Any:
    try:
        from prometheus_client import exposition
    except ImportError:
        raise BackendUnavailable("package", "prometheus-client", "install it: pip install 'hocket[server]'") from None
    return exposition
