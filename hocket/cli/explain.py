"""`hocket explain`: what a configuration would do, told by the parts that would do it (`hocket/explain/`). Starts no
rank; imports nothing heavy."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from hocket.cli.options import engine_options
from hocket.config.options import Options


@engine_options()
def explain(
    *,
    options: Options,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            help="memory to assume, in GiB: of each GPU, or of the host (default: what is free here)", min=0.01
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="the same as one JSON object")] = False,
) -> None:
    """Print what a configuration would do, and what became of every option.

    Shapes, ranks and experts, bytes that each transport moves, memory and KV blocks, which steps would split and why,
    in which order they would run, which CUDA graphs would be captured.

    Nothing is loaded and no rank is started; a model's config.json is enough, and --device cuda needs no GPU. A refused
    option is named with the reason, the rest is told without it, and the exit code is 2.

    Examples:

    hocket explain --data-parallel-size 2 --enable-expert-parallel --enable-dbo

    hocket explain --model benchmarks/shapes/deepseek-v3 --data-parallel-size 64 --enable-expert-parallel --device cuda
    --memory-gib 139
    """
    from hocket.explain.describe import describe

    found, refusal = describe(options, None if memory_gib is None else int(memory_gib * (1 << 30)))
    if json_output:
        print(json.dumps(found, ensure_ascii=False))
    else:
        from hocket.doctor.show import console
        from hocket.explain.show import show

        show(found, console())
    if refusal is not None:
        raise refusal
