"""`hocket bench …`: the benchmarks' command line. The measuring itself is in `hocket.bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from hocket.cli.options import engine_options
from hocket.config.options import Options

bench_app = typer.Typer(no_args_is_help=True)


@bench_app.callback()
def _bench() -> None:
    """Measure. Every figure comes with its spread.

    A table for people and, as the last line, JSON go to standard output: … | tail -n 1 gives the JSON alone.
    """


@bench_app.command()
@engine_options()
def throughput(
    *,
    options: Options,
    num_prompts: Annotated[int, typer.Option(help="requests, over all ranks", min=1)] = 64,
    input_len: Annotated[int, typer.Option(help="tokens of a random prompt", min=1)] = 64,
    output_len: Annotated[int, typer.Option(help="tokens to generate per request", min=1)] = 64,
    prompts_file: Annotated[
        str | None, typer.Option(help="text file, one prompt a line, instead of random tokens")
    ] = None,
    repeats: Annotated[int, typer.Option(help="measured runs, after one to warm up", min=1)] = 5,
    output: Annotated[str | None, typer.Option(help="also write the result to this JSON file")] = None,
) -> None:
    """Offline throughput: requests/s, tokens/s, and where a step's time goes.

    Example: hocket bench throughput --model tiny --data-parallel-size 2 --enable-expert-parallel
    """
    from hocket.bench.throughput import Workload, run

    work = Workload(num_prompts=num_prompts, input_len=input_len, output_len=output_len, prompts_file=prompts_file)
    run(options, work, repeats=repeats, output=output)


@bench_app.command()
@engine_options(data_parallel_size=2, enable_expert_parallel=True)
def overlap(
    *,
    options: Options,
    prompt_len: Annotated[int, typer.Option(help="tokens of a random prompt; a step holds one", min=2)] = 512,
    prompts_per_rank: Annotated[int, typer.Option(help="prompts of a run on each rank", min=1)] = 8,
    repeats: Annotated[int, typer.Option(help="measured runs of each, in turn", min=1)] = 5,
    output: Annotated[str | None, typer.Option(help="also write the result to this JSON file")] = None,
) -> None:
    """Overlap off against on, over an emulated link that takes about as long as compute.

    The same prompts, on the same ranks; fails where their tokens differ. For another link: --emulate-link-gb-per-s
    and --emulate-link-latency-us.

    Example: hocket bench overlap --model tiny
    """
    from hocket.bench.overlap import Workload, run

    work = Workload(prompt_len=prompt_len, prompts_per_rank=prompts_per_rank)
    report = run(options, work, repeats=repeats, output=output)
    if not report["rows"][0]["same_tokens"]:
        raise typer.Exit(1)


@bench_app.command()
def handover(
    num_ubatches: Annotated[int, typer.Option(help="ubatches that take turns", min=2)] = 2,
    num_hand_overs: Annotated[int, typer.Option(help="hand-overs of a run", min=2)] = 20_000,
    repeats: Annotated[int, typer.Option(help="measured runs of each, in turn", min=1)] = 5,
    output: Annotated[str | None, typer.Option(help="also write the result to this JSON file")] = None,
) -> None:
    """What a hand-over between ubatches costs, with greenlets and with threads."""
    from hocket.bench.handover import run

    run(num_ubatches=num_ubatches, num_hand_overs=num_hand_overs, repeats=repeats, output=output)
