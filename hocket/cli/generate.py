"""`hocket generate`: prompts in, text out. Knows how to print results; everything else is `LLM`'s."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hocket.cli.options import TRACE_STEPS, TraceFile, TraceSteps, engine_options
from hocket.config.options import Options
from hocket.errors import ConfigError

if TYPE_CHECKING:
    from hocket.llm import LLM
    from hocket.outputs import RequestOutput
    from hocket.request import SamplingParams

_SAMPLING = "Sampling"


@engine_options()
def generate(
    *,
    options: Options,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="a prompt; may be given again")] = None,
    prompt_token_ids: Annotated[
        list[str] | None, typer.Option(help="a prompt as token ids, such as 1,17,4; may be given again")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="each prompt is a user's message: apply the template")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="one JSON object: outputs, options, counters")] = False,
    trace: TraceFile = None,
    trace_steps: TraceSteps = TRACE_STEPS,
    max_tokens: Annotated[
        int | None, typer.Option(help="most tokens of a completion (default: 16)", rich_help_panel=_SAMPLING)
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(help="before it may stop (default: 0)", rich_help_panel=_SAMPLING)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0: greedy (default: the model's generation_config.json, else 1)", rich_help_panel=_SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="nucleus sampling (default likewise, else 1)", rich_help_panel=_SAMPLING)
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            help="most likely tokens to choose from, 0: all (default likewise, else 0)", rich_help_panel=_SAMPLING
        ),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="least probability relative to the likeliest (default likewise, else 0)", rich_help_panel=_SAMPLING
        ),
    ] = None,
    n: Annotated[
        int | None, typer.Option("--n", help="completions per prompt (default: 1)", rich_help_panel=_SAMPLING)
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="stop string; repeatable", rich_help_panel=_SAMPLING)] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="go on after the end-of-text token", rich_help_panel=_SAMPLING)
    ] = False,
    logprobs: Annotated[
        int | None,
        typer.Option(help="so many likeliest tokens at each position, -1: all; with --json", rich_help_panel=_SAMPLING),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, typer.Option(help="the same for the prompt; with --json", rich_help_panel=_SAMPLING)
    ] = None,
) -> None:
    """Generate text for one or more prompts.

    Examples:

    hocket generate -p 'In the beginning' --data-parallel-size 2 --enable-expert-parallel

    hocket generate -p 'Who was Emma?' --chat --max-tokens 60

    hocket generate -p 'The lady was' --n 3 --temperature 1 --stop '.' --logprobs 2 --json
    """
    prompts = _prompts(prompt, prompt_token_ids)
    given: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "n": n,
        "stop": stop or None,
        "ignore_eos": ignore_eos or None,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    sampling = _sampling(options, {name: value for name, value in given.items() if value is not None})
    from hocket.bench.attached import Attached, recording
    from hocket.llm import LLM

    attached = Attached.asked(trace, trace_steps, options)
    conversations = [[{"role": "user", "content": one}] for one in prompts]

    def check(llm: LLM) -> None:
        llm.check(llm.rendered(conversations) if chat else prompts)

    with LLM.from_options(options, progress=True, check=check) as llm:
        if not json_output and not logging.getLogger("hocket").isEnabledFor(logging.INFO):  # the log has it then
            print(f"hocket: {llm.summary()}", file=sys.stderr)
        started = time.perf_counter()
        with recording(llm, attached, "the first steps of generate"):
            if chat:
                results = llm.chat(conversations, sampling)
            else:
                results = llm.generate(prompts, sampling)
        seconds = time.perf_counter() - started
        if json_output:
            print(json.dumps(_report(llm, options, sampling, results, seconds), ensure_ascii=False, allow_nan=False))
        else:
            _print_text(results, seconds, llm)


def _prompts(texts: list[str] | None, ids: list[str] | None) -> list[Any]:
    prompts: list[Any] = list(texts or ())
    for text in ids or ():
        try:
            prompts.append({"prompt_token_ids": [int(part) for part in text.split(",")]})
        except ValueError:
            raise ConfigError("prompt_token_ids", text, "whole numbers with commas between, such as 1,17,4") from None
    if not prompts:
        raise ConfigError("prompt", None, "at least one --prompt or --prompt-token-ids")
    return prompts


def _sampling(options: Options, given: dict[str, Any]) -> SamplingParams:
    """The model's own defaults (generation_config.json), overridden by what was given; before anything is loaded."""
    from hocket.config.resolve import model_folder
    from hocket.generation_config import GenerationConfig
    from hocket.request import SamplingParams

    defaults = GenerationConfig.from_pretrained(model_folder(options.model)).defaults
    return SamplingParams(**{**defaults, **given})


def _num_tokens(results: list[RequestOutput]) -> int:
    return sum(len(completion.token_ids) for result in results for completion in result.outputs)


def _print_text(results: list[RequestOutput], seconds: float, llm: LLM) -> None:
    from hocket.worker.stats import overlap_line

    for result in results:
        for completion in result.outputs:
            if result.prompt is None:
                print(f"{result.prompt_token_ids} → {completion.token_ids}  [{completion.finish_reason}]\n")
            else:
                text = completion.text or f"(token ids {completion.token_ids})"
                print(f"{result.prompt}▸{text}  [{completion.finish_reason}]\n")
    tokens = _num_tokens(results)
    stats = llm.stats()
    ranks = len(stats)
    print(f"{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.1f} tokens/s on {ranks} rank{'s' * (ranks > 1)}")
    if llm.config.overlap.num_ubatches > 1:
        print(f"{overlap_line(stats[0]['overlap'])} (on rank 0)")


def _report(
    llm: LLM, options: Options, sampling: SamplingParams, results: list[RequestOutput], seconds: float
) -> dict[str, Any]:
    import msgspec

    tokens = _num_tokens(results)
    return {
        "outputs": [asdict(result) for result in results],
        "options": asdict(options) | {"resolved": msgspec.to_builtins(llm.config)},
        "sampling": msgspec.to_builtins(sampling),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "ranks": llm.stats(),
    }
