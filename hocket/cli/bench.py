"""`hocket bench …`: the benchmarks' command line. The measuring itself is in `hocket.bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from hocket.cli.options import TRACE_STEPS, TraceFile, TraceSteps, engine_options
from hocket.config.options import Options

_TOKENS_HELP = "tokens of each rank's step, with commas between"
_REUSE_HELP = "decode the same prompts in every repeat, from the prefix cache (quicker); else nothing is cached"
_STRATEGIES_HELP = (
    "serial, dual_batch or both, in turn on one engine; dual_batch splits every step (default: what --enable-dbo says)"
)
_LINK_DISPATCH_HELP = (
    "what an emulated link counts for a slice's dispatched rows, each of them once for every expert of its token: fp8 "
    "with scales, or dtype, that of the model"
)
_BytesPerS = Annotated[
    float | None, typer.Option(help="memory rate for the floor (default: measured, on a GPU)", min=1)
]
_FlopsPerS = Annotated[
    float | None,
    typer.Option(help="rate of matrix products for the floor (default: measured in bf16, on a GPU)", min=1),
]
_Fp8FlopsPerS = Annotated[float | None, typer.Option(help="the same in fp8 (default: twice the other)", min=1)]
_SliceOfEp = Annotated[
    int | None,
    typer.Option(help="dummy weights only: as many experts per rank, and rows for each, as on a GPU of EP-N", min=1),
]
_Repeats = Annotated[int, typer.Option(help="measured runs of each, in turn, after one to warm up", min=1)]
_Output = Annotated[str | None, typer.Option(help="also write the result to this JSON file")]

bench_app = typer.Typer(no_args_is_help=True)


@bench_app.callback()
def _bench() -> None:
    """Measure. Every figure comes with its spread.

    A table for people and, as the last line, JSON go to standard output: … | tail -n 1 gives the JSON alone.
    """


@bench_app.command()
@engine_options()
def step(
    *,
    options: Options,
    tokens_per_gpu: Annotated[str, typer.Option(help=_TOKENS_HELP + " (decode)")] = "64,128,256",
    phase: Annotated[str, typer.Option(help="decode, prefill or both")] = "decode,prefill",
    strategies: Annotated[str | None, typer.Option(help=_STRATEGIES_HELP)] = None,
    context: Annotated[int, typer.Option(help="tokens that a decode sees; tokens of a prompt", min=2)] = 1024,
    num_steps: Annotated[int, typer.Option(help="decode steps of a run, at least", min=1)] = 32,
    num_prefill_steps: Annotated[int, typer.Option(help="prefill steps of a run, at least", min=1)] = 8,
    repeats: _Repeats = 5,
    bytes_per_s: _BytesPerS = None,
    flops_per_s: _FlopsPerS = None,
    fp8_flops_per_s: _Fp8FlopsPerS = None,
    slice_of_ep: _SliceOfEp = None,
    num_layers: Annotated[
        int | None, typer.Option(help="dummy weights only: so many layers instead of the model's", min=1)
    ] = None,
    num_dense_layers: Annotated[
        int | None, typer.Option(help="dummy weights only: so many of the layers dense instead of the model's", min=0)
    ] = None,
    link_dispatch: Annotated[str, typer.Option(help=_LINK_DISPATCH_HELP)] = "fp8",
    count_kernels: Annotated[bool, typer.Option(help="count kernels per step, by one more run of each")] = False,
    reuse_prompts: Annotated[bool, typer.Option(help=_REUSE_HELP)] = False,
    trace: TraceFile = None,
    trace_steps: TraceSteps = TRACE_STEPS,
    output: _Output = None,
) -> None:
    """A step of the whole engine: decodes of so many requests, and prefill at so many tokens, beside their floor.

    Prompts are random. A prefill step has --max-num-batched-tokens (default here: 4096) tokens. With dual_batch there
    are the compute and the communication of a step each alone too, whole and in halves, and the bound, the larger of
    the halves.

    Example: hocket bench step --model tiny --data-parallel-size 2 --enable-expert-parallel --tokens-per-gpu 4,16
    --strategies serial,dual_batch
    """
    from hocket.bench.cells import PHASES, names, whole_numbers
    from hocket.bench.rates import GivenRates
    from hocket.bench.step import LINK_DISPATCHES, Sweep, run
    from hocket.bench.strategies import STRATEGIES, default_strategies

    sweep = Sweep(
        tokens_per_gpu=whole_numbers("tokens_per_gpu", tokens_per_gpu),
        phases=names("phase", phase, PHASES),
        strategies=(
            tuple(dict.fromkeys(names("strategies", strategies, STRATEGIES)))
            if strategies is not None
            else default_strategies(options)
        ),
        context=context,
        num_steps=num_steps,
        num_prefill_steps=num_prefill_steps,
        repeats=repeats,
        rates=GivenRates(bytes_per_s=bytes_per_s, flops_per_s=flops_per_s, fp8_flops_per_s=fp8_flops_per_s),
        slice_of_ep=slice_of_ep,
        num_layers=num_layers,
        num_dense_layers=num_dense_layers,
        link_dispatch=names("link_dispatch", link_dispatch, LINK_DISPATCHES)[0],
        count_kernels=count_kernels,
        reuse_prompts=reuse_prompts,
    )
    run(options, sweep, output=output, trace=trace, trace_steps=trace_steps)


@bench_app.command()
@engine_options(without=("moe_backend", "all2all_backend"))
def layer(
    *,
    options: Options,
    tokens_per_gpu: Annotated[str, typer.Option(help=_TOKENS_HELP)] = "64,128,256,512",
    experts: Annotated[str, typer.Option(help="expert kernels, with commas between; as --moe-backend")] = "auto",
    transports: Annotated[str, typer.Option(help="the same for transports; as --all2all-backend")] = "auto",
    repeats: _Repeats = 5,
    rounds: Annotated[int, typer.Option(help="calls that one figure goes over", min=1)] = 10,
    bytes_per_s: _BytesPerS = None,
    flops_per_s: _FlopsPerS = None,
    fp8_flops_per_s: _Fp8FlopsPerS = None,
    slice_of_ep: _SliceOfEp = None,
    output: _Output = None,
) -> None:
    """One sparse layer alone, with dummy weights: router, dispatch, experts, combine, for each pair of backends.

    On GPUs each part is captured in a CUDA graph where it can be (--enforce-eager: never).

    Example: hocket bench layer --model tiny --data-parallel-size 2 --enable-expert-parallel --tokens-per-gpu 64
    """
    from hocket.bench.cells import names, whole_numbers
    from hocket.bench.layer import Sweep, run
    from hocket.bench.rates import GivenRates
    from hocket.config.backends import EP_TRANSPORTS, EXPERTS

    sweep = Sweep(
        tokens_per_gpu=whole_numbers("tokens_per_gpu", tokens_per_gpu),
        experts=names("experts", experts, ("auto", *EXPERTS)),
        transports=names("transports", transports, ("auto", *EP_TRANSPORTS)),
        repeats=repeats,
        rounds=rounds,
        rates=GivenRates(bytes_per_s=bytes_per_s, flops_per_s=flops_per_s, fp8_flops_per_s=fp8_flops_per_s),
        slice_of_ep=slice_of_ep,
    )
    run(options, sweep, output=output)


@bench_app.command()
def table(
    files: Annotated[list[str], typer.Argument(help="results of one benchmark, as written by --output")],
) -> None:
    """Results as a markdown table, those of other engines beside ours.

    Example: hocket bench table benchmarks/results/*-step-*.json
    """
    from hocket.bench.table import read_reports, table_of

    typer.echo(table_of(read_reports(files)))


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
    trace: TraceFile = None,
    trace_steps: TraceSteps = TRACE_STEPS,
    output: _Output = None,
) -> None:
    """Offline throughput: requests/s, tokens/s, and where a step's time goes.

    Example: hocket bench throughput --model tiny --data-parallel-size 2 --enable-expert-parallel
    """
    from hocket.bench.attached import Attached
    from hocket.bench.throughput import Workload, run

    work = Workload(num_prompts=num_prompts, input_len=input_len, output_len=output_len, prompts_file=prompts_file)
    run(options, work, repeats=repeats, output=output, attached=Attached.asked(trace, trace_steps, options))


@bench_app.command()
@engine_options(data_parallel_size=2, enable_expert_parallel=True)
def overlap(
    *,
    options: Options,
    prompt_len: Annotated[int, typer.Option(help="tokens of a random prompt; a step holds one", min=2)] = 512,
    prompts_per_rank: Annotated[int, typer.Option(help="prompts of a run on each rank", min=1)] = 8,
    repeats: _Repeats = 5,
    output: _Output = None,
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
    repeats: _Repeats = 5,
    output: _Output = None,
) -> None:
    """What a hand-over between ubatches costs, with greenlets and with threads."""
    from hocket.bench.handover import run

    run(num_ubatches=num_ubatches, num_hand_overs=num_hand_overs, repeats=repeats, output=output)


@bench_app.command()
def serve(
    url: Annotated[
        list[str] | None,
        typer.Option(help="a running server; if given again, all in turn", show_default=False),
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="requests of a run", min=1)] = 64,
    request_rate: Annotated[
        float | None, typer.Option(help="requests that arrive a second (default: all at once)", min=1e-3)
    ] = None,
    arrivals: Annotated[str, typer.Option(help="poisson: at random; fixed: evenly")] = "poisson",
    max_concurrency: Annotated[
        int | None, typer.Option(help="requests at once; more wait, which no figure shows (default: no limit)", min=1)
    ] = None,
    input_len: Annotated[int, typer.Option(help="tokens of a random prompt", min=1)] = 64,
    output_len: Annotated[int, typer.Option(help="tokens to generate per request", min=1)] = 64,
    prompts_file: Annotated[
        str | None, typer.Option(help="text file, one prompt a line, instead of random tokens")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="random token ids are below this", min=1)] = 1000,
    chat: Annotated[bool, typer.Option("--chat", help="each line of the file is a user's message")] = False,
    ignore_eos: Annotated[bool, typer.Option(help="generate all --output-len tokens")] = True,
    temperature: Annotated[float, typer.Option(help="0: greedy", min=0.0)] = 0.0,
    model: Annotated[str | None, typer.Option(help="name to send (default: the one that is served)")] = None,
    api_key: Annotated[str | None, typer.Option(help="key to send (default: HOCKET_API_KEY)")] = None,
    limit: Annotated[float, typer.Option(help="seconds that an answer may take", min=0.1)] = 600.0,
    repeats: _Repeats = 5,
    output: _Output = None,
) -> None:
    """Load on a running server: when first tokens and further ones come, and tokens a second.

    Open loop: requests arrive at their rate, whatever became of those before. Any server with OpenAI's API will do.
    Exit code 1: requests failed (the table says why).

    Two servers are compared in turn: give --url twice and --output FILE; hocket bench table FILE shows the ratios.

    Examples:

    hocket bench serve --url http://127.0.0.1:8000 --request-rate 8 --output-len 32

    hocket bench serve --url http://127.0.0.1:8000 --url http://127.0.0.1:8001 --output ab.json
    """
    from hocket.bench.http_client import Server
    from hocket.bench.serve import Load, run
    from hocket.envs import API_KEY

    load = Load(
        num_prompts=num_prompts,
        input_len=input_len,
        output_len=output_len,
        request_rate=request_rate,
        arrivals=arrivals,
        max_concurrency=max_concurrency,
        prompts_file=prompts_file,
        vocab_size=vocab_size,
        chat=chat,
        ignore_eos=ignore_eos,
        temperature=temperature,
        model=model,
    )
    servers = [Server(one, api_key or API_KEY.get(), limit) for one in url or ["http://127.0.0.1:8000"]]
    report = run(servers, load, repeats=repeats, output=output)
    if any(row["num_failed"] for row in report["rows"]):
        raise typer.Exit(1)
