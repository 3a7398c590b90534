"""Runs one set of prompts in several configurations and says where their answers differ. Knows only the front door."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hocket.bench.report import check_output, provenance
from hocket.bench.requests import check_fits
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.dist.launcher import RankGroup, under_torchrun
from hocket.errors import BackendUnavailable, ConfigError, HocketError
from hocket.llm import LLM, front_of
from hocket.outputs import RequestOutput
from hocket.request import SamplingParams
from hocket.verify.compare import Answer, Comparison, Rules, compare
from hocket.verify.configurations import Configuration, check_prompts, configurations
from hocket.verify.split import Splits, check_splits, not_exercised
from hocket.verify.states import Bisection, LayerStates, bisect
from hocket.verify.workload import Workload

TOP = 5
"""Log-probabilities that are compared at each token, besides that of the token itself."""
_POLL_S = 1.0
OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Run:
    """What one configuration gave. lengths: tokens of each prompt. states: by layer, where they were asked for."""

    answers: list[Answer]
    lengths: list[int]
    splits: Splits
    step_tokens: int
    states: list[LayerStates]


class Ranks:
    """Rank processes for one engine after the other: started when they are first needed, and again where an error has
    ended them or `end` was called."""

    def __init__(self, num_ranks: int, startup_timeout_s: float) -> None:
        self._num_ranks, self._startup_timeout_s = num_ranks, startup_timeout_s
        self._group: RankGroup | None = None

    def llm(self, options: Options) -> LLM:
        """A new engine, its cache empty."""
        if self._group is None or self._group.closed:
            self._group = RankGroup.start(self._num_ranks, self._startup_timeout_s)
        return LLM.from_options(options, group=self._group)

    @property
    def pids(self) -> list[int]:
        """Process ids of the running ranks, by rank."""
        return [] if self._group is None else [pid for _, pid in sorted(self._group.pids.items())]

    def end(self) -> None:
        if self._group is not None:
            self._group.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def verify(
    options: Options,
    work: Workload,
    *,
    tolerance: float | None = None,
    tie_tolerance: float | None = None,
    with_states: bool = False,
    output: str | None = None,
    on_progress: OnProgress = lambda done, total, name: None,
) -> dict[str, Any]:
    """Compare all configurations with the first; the result as plain values, "problems" empty where all is well.

    Raises:
        ConfigError, BackendUnavailable: the options, or the prompts, cannot be verified.
        HocketError: the first configuration failed; there is nothing to compare with.
    """
    if under_torchrun():
        raise HocketError("hocket verify starts ranks anew, which torchrun's cannot be: run it without torchrun")
    check_output(output)
    chosen, skipped = configurations(options, work)
    config = resolve(chosen[0].options)
    prompts = work.prompts(config.parallel.data_parallel_size, config.model.vocab_size, options.seed)
    check_prompts(prompts, options)
    if work.prompts_file is None:
        check_fits(config, "prompt_len", work.prompt_len, work.output_len)
    else:
        _, processor = front_of(chosen[0].options, config)
        for prompt in prompts:
            processor.check(prompt)
    rules = Rules.of(config.dtype, exact=config.deterministic, logprob=tolerance, tie=tie_tolerance)
    rows: list[dict[str, Any]] = []
    with Ranks(config.parallel.data_parallel_size, options.startup_timeout) as ranks:
        first: Run | None = None
        for done, one in enumerate(chosen):
            on_progress(done, len(chosen), one.name)
            if one.is_restarted and not chosen[done - 1].is_restarted:
                ranks.end()
            if first is None:
                first = _run(ranks, one, prompts, work)
                first.states.extend(_states(ranks, one, prompts, first.answers) if with_states else ())
                row = _row(one, first.splits, compare(first.answers, first.answers, rules), None)
            else:
                row = _checked(ranks, one, prompts, work, first, rules)
                if one.is_reversed and row["comparison"] is not None:
                    rules = rules.measured(row["comparison"]["usual_difference"], config.dtype)
            rows.append(row | {"pids": ranks.pids})
    assert first is not None
    problems = [f"{row['name']}: {row['problem']}" for row in rows if row["problem"]]
    return provenance("verify") | {
        "model": options.model,
        "num_ranks": config.parallel.data_parallel_size,
        "dtype": config.dtype,
        "deterministic": config.deterministic,
        "rules": asdict(rules),
        "workload": asdict(work) | {"num_prompts": len(prompts), "lengths": first.lengths},
        "step_tokens": first.step_tokens,
        "not_exercised": not_exercised(first.splits, longest_prompt=max(first.lengths), step_tokens=first.step_tokens),
        "skipped": skipped,
        "problems": problems,
        "rows": rows,
    }


def _checked(
    ranks: Ranks, one: Configuration, prompts: Sequence[Any], work: Workload, first: Run, rules: Rules
) -> dict[str, Any]:
    """Run a configuration and compare it with the first; an engine that fails is a result too."""
    try:
        run = _run(ranks, one, prompts, work)
        comparison, splits = compare(first.answers, run.answers, rules), run.splits
    except (ConfigError, BackendUnavailable):
        raise
    except HocketError as error:
        return _row(one, Splits(), None, None, error=error)
    if not first.states or one.is_reversed:
        return _row(one, splits, comparison, None)
    try:
        states = _states(ranks, one, prompts, first.answers)
        return _row(one, splits, comparison, bisect(first.states, states, rules.state, rules.stray))
    except HocketError as error:
        return _row(one, splits, comparison, None, error=error)


def _run(ranks: Ranks, one: Configuration, prompts: Sequence[Any], work: Workload) -> Run:
    """All prompts on an engine of its own; what it gave is in their order, whichever they were asked in."""
    order = slice(None, None, -1 if one.is_reversed else 1)
    params = SamplingParams(temperature=0.0, max_tokens=work.output_len, ignore_eos=True, logprobs=TOP)
    with ranks.llm(one.options) as llm:
        llm.stats(reset=True)
        results = llm.generate(list(prompts[order]), params, use_tqdm=False, data_parallel_rank=_places(prompts, one))
        splits = check_splits(llm.stats(), one.num_ubatches)
        step_tokens = llm.config.scheduler.max_num_batched_tokens
    results = results[order]
    lengths = [len(result.prompt_token_ids) for result in results]
    return Run([_answer(result) for result in results], lengths, splits, step_tokens, [])


def _places(prompts: Sequence[Any], one: Configuration) -> list[int]:
    """A prompt is on the same rank in every configuration (but where they are reversed)."""
    return [i % one.options.data_parallel_size for i in range(len(prompts))]


def _answer(result: RequestOutput) -> Answer:
    completion = result.outputs[0]
    rows = completion.logprobs or []
    return Answer(completion.token_ids, [{token: one.logprob for token, one in row.items()} for row in rows])


def _states(
    ranks: Ranks, one: Configuration, prompts: Sequence[Any], answers: Sequence[Answer]
) -> Iterator[LayerStates]:
    """Every layer's states over the prompts and `answers`, whatever this configuration would have answered; from a new
    engine, in whose cache nothing lies yet. Nothing runs in a graph, which has no states to show."""
    with ranks.llm(replace(one.options, enforce_eager=True)) as llm:
        client, ids = llm.client, [str(i) for i in range(len(prompts))]
        client.record_states({id_: list(a.token_ids) for id_, a in zip(ids, answers, strict=True)})
        params = [
            SamplingParams(temperature=0.0, max_tokens=len(a.token_ids), ignore_eos=True, logprobs=0) for a in answers
        ]
        client.add_many(list(zip(ids, prompts, params, _places(prompts, one), strict=True)))
        while client.has_unfinished:
            client.poll(_POLL_S)
        for layer in range(llm.config.model.num_layers):
            yield LayerStates.of(client.states(layer))


def _row(
    one: Configuration,
    splits: Splits,
    comparison: Comparison | None,
    bisection: Bisection | None,
    error: HocketError | None = None,
) -> dict[str, Any]:
    """A configuration as plain values."""
    problem = None
    if error is not None:
        problem = f"{type(error).__name__}: {error}"
    elif comparison is not None and not comparison.agrees:
        problem = "answers drift" if comparison.first is None else "other answers"
    elif bisection is not None and bisection.first is not None:
        problem = "other hidden states"
    elif splits.problem is not None:
        problem = f"not a verification: {splits.problem}"
    return {
        "name": one.name,
        "transport": one.transport,
        "num_ubatches": one.num_ubatches,
        "is_restarted": one.is_restarted,
        "splits": asdict(splits),
        "comparison": None if comparison is None else asdict(comparison),
        "bisection": None if bisection is None else _plain(bisection),
        "problem": problem,
    }


def _plain(bisection: Bisection) -> dict[str, Any]:
    first = bisection.first
    return vars(bisection) | {"first": None if first is None else first.as_dict()}
