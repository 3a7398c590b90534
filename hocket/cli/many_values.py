"""A command with an option that takes several values in a row, `--name a b`. Knows nothing of what they are for.

Typer's options take one value each time they are given; here `--name a b` is read as `--name a --name b`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from typer.core import TyperCommand

from hocket.errors import ConfigError


def with_many_values(option: str, argument: str) -> type[TyperCommand]:
    """For `app.command(cls=…)`. option: as "--name"; argument: the option that says the same as the command's argument.

    Values go on to the next option. Where the argument is still to come, the last of several is it.
    """

    class Command(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            flags = {name for p in self.params if getattr(p, "is_flag", False) for name in (*p.opts, *p.secondary_opts)}
            return super().parse_args(ctx, one_by_one(args, option, argument, flags))

    return Command


def one_by_one(words: Sequence[str], option: str, argument: str, flags: set[str]) -> list[str]:
    """`words` with the option before each of its values. flags: options without a value.

    Raises:
        ConfigError: the option has no value.
    """
    found: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        found.append(word)
        if word != option:
            continue
        values = list(takewhile(lambda word: not word.startswith("-"), rest))
        if not values:
            raise ConfigError(option.removeprefix("--").replace("-", "_"), "", "one or more, before the next option")
        if len(values) > 1 and not _has_argument(found[:-1], flags) and argument not in words:
            values.pop()
        found += [word for value in values for word in (value, option)][:-1]
        del rest[: len(values)]
    return found


def _has_argument(words: list[str], flags: set[str]) -> bool:
    """Whether one of them is neither an option nor its value."""
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            return True
        is_value = not is_value and word not in flags and "=" not in word
    return False
