"""`hocket verify`: the same prompts in several configurations, compared. The comparing itself is in `hocket.verify`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from hocket.cli.options import engine_options
from hocket.config.options import Options


@engine_options(data_parallel_size=2, enable_expert_parallel=True)
def verify(
    *,
    options: Options,
    num_prompts: Annotated[int, typer.Option(help="random prompts, over all ranks; --seed draws them", min=1)] = 12,
    prompt_len: Annotated[int, typer.Option(help="tokens of the longest; the others are shorter", min=4)] = 96,
    output_len: Annotated[int, typer.Option(help="tokens to generate for each", min=1)] = 8,
    prompts_file: Annotated[
        str | None, typer.Option(help="text file, one prompt a line, instead of random tokens")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="most that a log-probability may differ (default: by dtype)", min=0)
    ] = None,
    tie_tolerance: Annotated[
        float | None, typer.Option(help="how near two tokens must be for either to be right (default: by dtype)", min=0)
    ] = None,
    bisect: Annotated[
        bool, typer.Option("--bisect", help="also compare hidden states, layer by layer, over the same text")
    ] = False,
    output: Annotated[str | None, typer.Option(help="also write the result to this JSON file")] = None,
) -> None:
    """Check that overlap changes no answer: the same prompts, greedily, with it off and on.

    Overlap off, two ubatches and three (and --ubatch-size), on both transports that run everywhere or the one that
    --all2all-backend names; at last off and two on ranks that were started anew. Each is compared with the first. The
    prompts differ in length, so that prefills, chunked prefills, decodes and steps of both are split; thresholds are
    lowered for that. A kind of step that was never split is a failure of its own: equal answers would prove nothing.

    What counts as the same: tokens are equal, and so are log-probabilities within --tolerance (float32: 1e-4, float16:
    0.1, bfloat16: 0.5). Where both runs find two tokens equally likely within --tie-tolerance (twice --tolerance, as
    each of them may move so far), either one is right; what follows it in that request is not compared. In float16
    and bfloat16, where one token that gets another expert moves that much, four tokens of five must besides be within
    twice what the dtype alone changes: that is measured by one more run, without overlap, with the prompts reversed.
    With --deterministic nothing may differ, to the last bit.

    --bisect runs each configuration once more, over the first one's tokens, and names the first layer, and the ubatch,
    whose hidden states differ (float32: by over 1e-4 of their length; float16: 0.02 and bfloat16: 0.1, in over 2 % of
    the tokens, as near ties between experts move a few).

    Exit code 0: all agree, and steps were split; 1: not, or an engine failed; 2: wrong options. A table for people and,
    as the last line, JSON go to standard output.

    Example: hocket verify --model tiny --bisect
    """
    from hocket.bench.report import emit
    from hocket.verify.run import verify as run
    from hocket.verify.show import show
    from hocket.verify.workload import Workload

    work = Workload(num_prompts=num_prompts, prompt_len=prompt_len, output_len=output_len, prompts_file=prompts_file)
    with _progress() as on_progress:
        report = run(
            options,
            work,
            tolerance=tolerance,
            tie_tolerance=tie_tolerance,
            with_states=bisect,
            output=output,
            on_progress=on_progress,
        )
    show(report)
    emit(report, output)
    if report["problems"]:
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A line on standard error that says which configuration runs, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, total, name: None
        return
    with console.status("verifying") as status:
        yield lambda done, total, name: status.update(f"{done + 1}/{total}: {name}")
