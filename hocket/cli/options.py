"""Makes command-line parameters from the table of options. Knows nothing of what commands do."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import Field, fields
from typing import Annotated, Any

import typer

from hocket.config.options import Options, option_type, read_yaml
from hocket.errors import ConfigError

TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="FILE", help="record the lanes of some steps: FILE.html, a page, and FILE.json, for Perfetto"
    ),
]
TraceSteps = Annotated[int, typer.Option(help="how many steps --trace records, at most", min=1)]
TRACE_STEPS = 8
_CONFIG_HELP = "YAML file of options, same names; the command line wins"


def engine_options(
    *, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: gives a command every engine option; the command gets the chosen ones as one `Options` argument.

    The command's own parameters must be annotated for typer and come by keyword; it takes `options: Options` besides.
    defaults: the command's own, by option, instead of the table's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        chosen = [option for option in fields(Options) if option.name not in without]
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "options"]
        engine_parameters = [_parameter(option, defaults.get(option.name, option.default)) for option in chosen]
        config = inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option("--config", help=_CONFIG_HELP, rich_help_panel="Model")],
        )

        @functools.wraps(command)
        def run(**given: Any) -> None:
            path = given.pop("config")
            values = defaults | (read_yaml(path) if path else {})
            engine = {option.name: given.pop(option.name) for option in chosen}
            values |= {name: value for name, value in engine.items() if value is not None}
            for name in without:
                if name in values:
                    raise ConfigError(name, values[name], "not to give it", where="with this command")
            command(**given, options=Options.from_dict(values))

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + [config, *engine_parameters]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _parameter(option: Field[Any], default: Any) -> inspect.Parameter:
    """A typer parameter whose default None means "not given": so a YAML file can supply it. `default`: for the help."""
    kind, _ = option_type(option)
    flag = "--" + option.name.replace("_", "-")
    names = [f"{flag}/--no-{flag[2:]}"] if kind is bool else [flag]
    text = option.metadata["help"]
    if option.metadata["choices"]:
        text += f": {', '.join(option.metadata['choices'])}"
    if default is not None:
        text += f" (default: {str(default).lower() if kind is bool else default})"
    annotation = Annotated[
        kind | None,  # type: ignore[valid-type]
        typer.Option(*names, help=text, rich_help_panel=option.metadata["group"], show_default=False),
    ]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
