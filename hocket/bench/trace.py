"""Records the spans of some steps of a run on all ranks. Knows only the offline front door, and no pictures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hocket.bench.report import link_of, provenance, strategy_of
from hocket.bench.requests import check_fits, generate_random
from hocket.config.backends import COPY_TRANSPORTS
from hocket.config.engine import EngineConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.dist.launcher import RankGroup
from hocket.errors import HocketError
from hocket.llm import LLM
from hocket.request import SamplingParams
from hocket.trace.recording import Recording, recording_of

PROMPT_LEN = {"prefill": 512, "decode": 32}
WARM_UP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What runs: `prompts` (texts), or random ones of `prompt_len` tokens (None: PROMPT_LEN).

    A prefill step holds one random prompt on each rank; a decode step `requests_per_rank` of them. Recorded are
    `num_steps` steps of `phase` after the first `skip`.
    """

    phase: str
    num_steps: int
    skip: int = 0
    prompts: tuple[str, ...] = ()
    prompt_len: int | None = None
    requests_per_rank: int = 32

    @property
    def length(self) -> int:
        return self.prompt_len or PROMPT_LEN[self.phase]

    @property
    def steps(self) -> int:
        return self.skip + self.num_steps

    def max_tokens(self, num_steps: int) -> int:
        """Of a request, so that there are `num_steps` steps of the phase, and no more decodes than that needs."""
        return 1 if self.phase == "prefill" else num_steps + 1


def record(options: Options, work: Workload, *, group: RankGroup | None = None) -> Recording:
    """Run the workload once to warm up, then once recorded; on running ranks where `group` has some.

    Raises:
        ConfigError: an option. HocketError: no such step was run.
    """
    options = _engine_options(options, work)
    config = resolve(options)
    prompts = list(work.prompts)
    if not prompts:
        check_fits(config, "prompt_len", work.length, max(work.max_tokens(WARM_UP_STEPS), work.max_tokens(work.steps)))
    with LLM.from_options(options, progress=True, group=group, check=lambda llm: llm.check(prompts)) as llm:
        _generate(llm, work, seed=0, num_steps=WARM_UP_STEPS)
        llm.client.record_steps(work.num_steps, skip=work.skip, phase=work.phase)
        _generate(llm, work, seed=1, num_steps=work.steps)
        recording = recorded(llm, about(options, config, work.phase))
    if not recording.ranks[0]:
        how = "give more or longer prompts, or a smaller --skip"
        raise HocketError(f"no {work.phase} step was run on every rank after the first {work.skip}: {how}")
    return recording


def recorded(llm: LLM, said: dict[str, Any]) -> Recording:
    """What every rank has recorded; said: of it, as `about`."""
    shares_experts = llm.config.parallel.enable_expert_parallel
    return recording_of(said, llm.client.recorded_steps(), moves=shares_experts)


def _engine_options(options: Options, work: Workload) -> Options:
    """The user's, with steps as the workload wants them, and nothing found in the cache after the warm-up. Prefills
    replay no graphs, so none are captured for them; and none where copies move tokens, which a profile of a graph does
    not tell from others."""
    by_copies = options.emulate_link_gb_per_s is not None or options.all2all_backend in COPY_TRANSPORTS
    is_eager = options.enforce_eager or work.phase == "prefill" or by_copies
    found = replace(options, enable_prefix_caching=False, enforce_eager=is_eager)
    if work.prompts:
        return found
    found = replace(found, skip_tokenizer_init=True)
    if work.phase == "prefill":
        return replace(found, max_num_batched_tokens=options.max_num_batched_tokens or work.length)
    tokens = max(options.max_num_batched_tokens or 0, work.length * work.requests_per_rank)
    return replace(found, max_num_batched_tokens=tokens, max_num_seqs=options.max_num_seqs or work.requests_per_rank)


def _generate(llm: LLM, work: Workload, *, seed: int, num_steps: int) -> None:
    max_tokens = work.max_tokens(num_steps)
    if work.prompts:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        llm.generate(list(work.prompts), params, use_tqdm=False)
        return
    count = num_steps if work.phase == "prefill" else work.requests_per_rank
    generate_random(llm, requests_per_rank=count, prompt_len=work.length, max_tokens=max_tokens, seed=seed)


def about(options: Options, config: EngineConfig, what: str) -> dict[str, Any]:
    """What a recording says of itself; what: was run, such as the phase of its steps."""
    link, parallel, strategy = link_of(config), config.parallel, strategy_of(config)
    over = ""
    if link["kind"] == "emulated":
        over = f" over an EMULATED link of {link['gb_per_s']:g} GB/s + {link['latency_us']:g} µs"
    ranks = f"{parallel.data_parallel_size} rank{'s' * (parallel.data_parallel_size > 1)}"
    how = "overlap off" if strategy == "off" else f"{strategy} ({config.overlap.executor})"
    how += "" if config.device == "cpu" else f" on {config.device}"
    found = provenance("trace")
    return {
        "title": f"{options.model} on {ranks}, {parallel.all2all_backend}{over}, {how}: {what}",
        "model": options.model,
        "phase": what,
        "num_ranks": parallel.data_parallel_size,
        "transport": parallel.all2all_backend,
        "strategy": strategy,
        "by_copies": link["kind"] == "emulated" or parallel.all2all_backend in COPY_TRANSPORTS,
        "link": link,
        **{name: found[name] for name in ("command", "commit", "date", "hardware", "versions")},
    }
