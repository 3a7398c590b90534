"""`hocket doctor`: what is here, what runs here, what a configuration would choose. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from hocket.cli.options import engine_options
from hocket.config.options import Options


@engine_options()
def doctor(
    *,
    options: Options,
    links: Annotated[bool, typer.Option("--links/--no-links", help="measure what joins the ranks")] = True,
    limit: Annotated[float, typer.Option(help="seconds for each part of the measurement", min=1.0)] = 20.0,
    json_output: Annotated[bool, typer.Option("--json", help="the same as one JSON object")] = False,
) -> None:
    """Print versions, hardware, measured links, which backends run here, and what a model would run with.

    Loads no weights. Exit code 0: all that is needed is there; 1: not; the last lines say what is missing.

    Example: hocket doctor --data-parallel-size 2 --enable-expert-parallel
    """
    from hocket.doctor.examine import examine

    with _progress() as on_progress:
        report = examine(options, links=links, limit_s=limit, on_progress=on_progress)
    if json_output:
        print(json.dumps(report, ensure_ascii=False))
    else:
        from hocket.doctor.show import console, show

        show(report, console())
    if report["problems"]:
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is being done, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("looking around") as status:
        yield lambda what: status.update(what)
