"""Checked reading of single values of a JSON object. Knows nothing of what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hocket.errors import ConfigError

MAX_WHOLE = 2**31 - 1


class Values:
    """The entries of a JSON object; null counts as absent, and what is absent has a default or is an error.

    Every method raises ConfigError, naming the file and the key, for a value of another type or out of bounds.
    """

    def __init__(self, values: Mapping[str, Any], file: str) -> None:
        self.values = values
        self._file = file

    def __contains__(self, key: str) -> bool:
        """Whether the key is there, be it with null."""
        return key in self.values

    def wrong(self, key: str, allowed: str) -> ConfigError:
        return ConfigError(f"{self._file}: {key}", self.values.get(key), allowed)

    def first_of(self, *keys: str) -> str:
        """The first of several spellings of a key that has a value, else that is there, else the first."""
        given = [key for key in keys if self.values.get(key) is not None]
        return [*given, *(key for key in keys if key in self), *keys][0]

    def whole(self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_WHOLE) -> int:
        """An integer; without a default the key is required."""
        allowed = f"a whole number, at least {least}" if most == MAX_WHOLE else f"a whole number from {least} to {most}"
        value = self._given(key, default, allowed)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(key, allowed)
        return value

    def number(self, key: str, default: float, *, least: float = 0.0, above: bool = True) -> float:
        """A finite number above `least`, or with `above` False at least that."""
        allowed = f"a number above {least:g}" if above else f"a number, at least {least:g}"
        value = self._given(key, default, allowed)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= 1e30:
            raise self.wrong(key, allowed)
        if value < least or (above and value == least) or math.isnan(value):
            raise self.wrong(key, allowed)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._given(key, default, "true or false")
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        value = self._given(key, default, "text")
        if not isinstance(value, str):
            raise self.wrong(key, "text")
        return value

    def object(self, key: str) -> dict[str, Any]:
        """An inner object; {} where there is none."""
        value = self._given(key, {}, "an object")
        if not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return dict(value)

    def wholes(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        """Nothing, one integer or a list of them."""
        value = self._given(key, [], "")
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) or not least <= i <= MAX_WHOLE for i in items):
            raise self.wrong(key, f"a whole number, at least {least}, or a list of them")
        return tuple(items)

    def _given(self, key: str, default: Any, allowed: str) -> Any:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise self.wrong(key, allowed + ("" if key in self.values else " (the key is missing)"))
        return default
