"""The error tree. Knows nothing of the rest of Hocket.

HocketError
├── ConfigError          a value the user gave is wrong: field, value, what is allowed
├── CheckpointError      a checkpoint does not hold exactly what the model needs: missing, unused or misshapen tensors
├── BackendUnavailable   a backend cannot run here: what to install, what works here instead
├── CapacityError        a request or a batch does not fit: needed and available
└── OverlapError         the lock-step of ranks or ubatches broke
    ├── UBatchFailed     one ubatch raised: rank, ubatch, stage, first cause
    ├── BatonTimeout     a hand-over did not come in time: who is late
    ├── RankLost         a rank died, never started or stopped answering: which
    └── StepDesync       ranks disagree about the step or the configuration: which rank
"""

from __future__ import annotations

from collections.abc import Iterable

_MAX_VALUE = 200
_MAX_ALLOWED = 600
"""Most characters of a message's parts."""


def _one_line(text: str, most: int) -> str:
    """Without line breaks, and cut in the middle where it is longer than `most` characters."""
    line = " ".join(text.split()) if len(text.splitlines()) > 1 else text
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 4 :]}"


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        text = f"<{type(value).__name__}>"
    return _one_line(text, _MAX_VALUE)


class HocketError(Exception):
    """Base of every error Hocket raises on purpose. `str(error)` is one line meant for the user."""


class ConfigError(HocketError, ValueError):
    """A wrong value: names the field, the value and what is allowed. `value` is whole, the message shortens it.

    A value of None is told as missing. `where`, if not empty, goes on after "is not allowed": the condition that the
    value fails under ("with …").
    """

    field: str = ""
    value: object = None
    allowed: str = ""

    def __init__(self, field: str, value: object, allowed: str, *, where: str = "") -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        refused = "is missing" if value is None else f"{_shown(value)} is not allowed"
        refused = f"{refused} {_one_line(where, _MAX_ALLOWED)}".rstrip()
        super().__init__(f"{field}: {refused}; allowed: {_one_line(allowed, _MAX_ALLOWED)}")


class CheckpointError(HocketError):
    """The checkpoint does not hold exactly the tensors the model needs."""


class BackendUnavailable(HocketError):
    """The asked-for backend cannot run here; the message says why and what works instead."""

    kind: str = ""
    name: str = ""
    why: str = ""

    def __init__(self, kind: str, name: str, why: str, available: Iterable[str] = ()) -> None:
        self.kind = kind
        self.name = name
        self.why = why
        names = ", ".join(available)
        super().__init__(f"{kind} {name!r} is not available: {why}" + (f"; available here: {names}" if names else ""))


class CapacityError(HocketError, ValueError):
    """Something does not fit; the message gives the needed and the available amount."""


class OverlapError(HocketError):
    """The lock-step of ranks or ubatches broke."""


class UBatchFailed(OverlapError):
    """One ubatch raised in a compute stage; the step failed on all ranks. code: what the step exchange says of it."""

    code: int = 1


class BatonTimeout(OverlapError):
    """A hand-over between ubatches did not come within the step limit."""


class RankLost(OverlapError):
    """A rank died, never started or stopped answering."""


class StepDesync(OverlapError):
    """Ranks disagree about the step number or the configuration."""


def revive(kind: str, message: str) -> HocketError:
    """An error that another process reported, as the same class where it is one of ours."""
    found = globals().get(kind)
    cls = found if isinstance(found, type) and issubclass(found, HocketError) else HocketError
    error: HocketError = cls.__new__(cls)
    Exception.__init__(error, message)
    return error
