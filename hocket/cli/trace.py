"""`hocket trace`: what ran when on each rank, as a picture here, a page and a Perfetto file. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hocket.cli.options import engine_options
from hocket.config.options import Options
from hocket.errors import ConfigError


@engine_options()
def trace(
    *,
    options: Options,
    phase: Annotated[str, typer.Option(help="which steps to record: prefill or decode")] = "prefill",
    num_steps: Annotated[int, typer.Option(help="steps to record, at most", min=1)] = 4,
    skip: Annotated[int, typer.Option(help="steps of that phase to let pass first, besides the warm-up", min=0)] = 0,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="a prompt, instead of random tokens; may be given again")
    ] = None,
    prompt_len: Annotated[
        int | None,
        typer.Option(help="tokens of a random prompt; a prefill step holds one (default: 512, or 32 to decode)", min=1),
    ] = None,
    requests_per_rank: Annotated[int, typer.Option(help="random prompts that decode together", min=1)] = 32,
    output: Annotated[str, typer.Option(help="where to write: OUTPUT.json and OUTPUT.html")] = "trace",
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(help="run nothing: show two traces side by side, before and after", metavar="BEFORE AFTER"),
    ] = None,
) -> None:
    """Record the lanes of some steps: how much of the communication lies under compute, and what does not.

    Prints one layer and the figures, and writes OUTPUT.html (a page that needs no network) and OUTPUT.json, which
    https://ui.perfetto.dev opens. With --compare only a page is written.

    On GPUs times are those of kernels, by torch's profiler. Decodes are replays of CUDA graphs there, whose kernels
    have no stages; with --enforce-eager they have.

    Examples:

    hocket trace --data-parallel-size 2 --enable-expert-parallel --enable-dbo --emulate-link-gb-per-s 0.06

    hocket trace --compare before.json after.json --output both
    """
    from hocket.bench.attached import PERFETTO
    from hocket.bench.report import check_output
    from hocket.bench.trace import PROMPT_LEN, Workload, record
    from hocket.trace import page, perfetto
    from hocket.trace.picture import console, show

    out = console()
    html, events = Path(f"{output}.html"), Path(f"{output}.json")
    if compare is not None:
        both = {label: perfetto.read(path) for label, path in zip(("before", "after"), compare, strict=True)}
        check_output(str(html))
        page.write(both, html)
        for label, recording in both.items():
            show(recording, out, label)
            out.print()
        print(f"{html}: both side by side")
        return
    if phase not in PROMPT_LEN:
        raise ConfigError("phase", phase, " or ".join(PROMPT_LEN))
    for path in (html, events):
        check_output(str(path))
    work = Workload(
        phase=phase,
        num_steps=num_steps,
        skip=skip,
        prompts=tuple(prompt or ()),
        prompt_len=prompt_len,
        requests_per_rank=requests_per_rank,
    )
    recording = record(options, work)
    perfetto.write(recording, events)
    page.write({"": recording}, html)
    show(recording, out)
    print(f"\n{html}: a page for any browser\n{events}: opens in {PERFETTO}")
