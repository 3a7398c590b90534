"""Collects the sub-commands and turns errors into one line and an exit code. Imports nothing heavy."""

from __future__ import annotations

import os
import sys

import typer

from hocket import __version__
from hocket.cli.bench import bench_app
from hocket.cli.doctor import doctor
from hocket.cli.explain import explain
from hocket.cli.generate import generate
from hocket.cli.main import INTERRUPTED
from hocket.cli.many_values import with_many_values
from hocket.cli.serve import serve
from hocket.cli.trace import trace
from hocket.cli.verify import verify
from hocket.config.harmless import REFUSED
from hocket.envs import set_up_logging
from hocket.errors import BackendUnavailable, ConfigError, HocketError

EXIT_CODES = (
    "Exit codes: 0 done; 1 the run failed (or answers differ); 2 wrong usage or configuration, or a "
    f"backend that cannot run here; {INTERRUPTED} interrupted. Errors are one line on standard error."
)

# The base of typer's usage errors; which module it lives in depends on typer's version.
_UsageError: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="hocket",
    help="Inference for mixture-of-experts models: data-parallel attention, expert-parallel experts.\n\n"
    "Try: hocket generate --model tiny --prompt 'In the beginning'",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command(cls=with_many_values("--served-model-name", "--model"))(serve)
app.command()(explain)
app.command()(doctor)
app.command()(trace)
app.command()(verify)
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


def run() -> int:
    """Run what the command line asks for; returns its exit code, see EXIT_CODES. Errors end in one line.

    Raises:
        KeyboardInterrupt: the user stopped it.
    """
    try:
        set_up_logging("hocket")
        if not sys.stdout.isatty():  # nobody's columns to respect: show names and values whole
            os.environ.setdefault("TERMINAL_WIDTH", "120")
        return _checked(int(app(standalone_mode=False) or 0))
    except (ConfigError, BackendUnavailable) as error:
        return _complain(error, 2)
    except HocketError as error:
        return _complain(error, 1)
    except OSError as error:
        print(f"hocket: {error}", file=sys.stderr)
        return 1
    except typer.Exit as leave:
        return _checked(int(leave.exit_code))
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except _UsageError as error:
        option = str(getattr(error, "option_name", ""))
        if why := REFUSED.get(option.removeprefix("--").replace("-", "_")):
            print(f"hocket: {option}: not supported: {why}", file=sys.stderr)
            return 2
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        if message:  # without arguments the help was printed instead
            print(f"hocket: {message} (see --help)", file=sys.stderr)
        return 2


def _checked(code: int) -> int:
    """The code of a command that came to its end; typer turns Ctrl-C into one."""
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _complain(error: HocketError, code: int) -> int:
    print(f"hocket: {type(error).__name__}: {error}", file=sys.stderr)
    return code
