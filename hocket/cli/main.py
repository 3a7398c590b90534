"""The `hocket` command: collects the sub-commands and turns errors into one line. Imports nothing heavy."""

from __future__ import annotations

import os
import sys

import typer

from hocket import __version__
from hocket.cli.bench import bench_app
from hocket.cli.doctor import doctor
from hocket.cli.explain import explain
from hocket.cli.generate import generate
from hocket.envs import set_up_logging
from hocket.errors import ConfigError, HocketError

_INTERRUPTED = 130

# The base of typer's usage errors; which module it lives in depends on typer's version.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="hocket",
    help="Inference for mixture-of-experts models: data-parallel attention, expert-parallel experts.\n\n"
    "Try: hocket generate --model tiny --prompt 'In the beginning'",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(explain)
app.command()(doctor)
app.add_typer(bench_app, name="bench")


def _version(value: bool) -> None:
    if value:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version"),
) -> None:
    """Holds the options that come before a sub-command."""


def main() -> int:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong options, 130 interrupted."""
    try:
        set_up_logging("hocket")
        if not sys.stdout.isatty():  # nobody's columns to respect: show names and values whole
            os.environ.setdefault("TERMINAL_WIDTH", "120")
        code = app(standalone_mode=False)
        return _interrupted() if code == _INTERRUPTED else int(code or 0)
    except ConfigError as error:
        return _complain(error, 2)
    except HocketError as error:
        return _complain(error, 1)
    except OSError as error:
        print(f"hocket: {error}", file=sys.stderr)
        return 1
    except typer.Exit as leave:
        return _interrupted() if leave.exit_code == _INTERRUPTED else int(leave.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted()
    except _UsageError as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:  # without arguments the help was printed instead
            print(f"hocket: {message} (see --help)", file=sys.stderr)
        return 2


def _interrupted() -> int:
    print("hocket: interrupted", file=sys.stderr)
    return _INTERRUPTED


def _complain(error: HocketError, code: int) -> int:
    print(f"hocket: {type(error).__name__}: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
