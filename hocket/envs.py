"""The one table of environment variables that Hocket reads of its own. Knows nothing of what they are for elsewhere."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from hocket.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Variable:
    """An environment variable: what it does and what it is when it is not set."""

    name: str
    default: str
    meaning: str

    def get(self) -> str:
        return os.environ.get(self.name, self.default)

    def get_int(self, least: int) -> int:
        """The value as a whole number; ConfigError for anything else."""
        value = self.get()
        if not value.isdecimal() or int(value) < least:
            raise ConfigError(self.name, value, f"a whole number, at least {least}")
        return int(value)

    def get_one_of(self, *allowed: str) -> str:
        """The value; ConfigError where it is none of `allowed`."""
        value = self.get()
        if value not in allowed:
            raise ConfigError(self.name, value, ", ".join(allowed))
        return value


LOG_LEVEL = Variable(
    name="HOCKET_LOG_LEVEL", default="WARNING", meaning="what front and ranks log to standard error: DEBUG to ERROR"
)
LOG_INTERVAL = Variable(
    name="HOCKET_LOG_INTERVAL",
    default="10",
    meaning="seconds between a working rank's lines about its requests, tokens and overlap (log level INFO); 0: none",
)
FORCE_SPLIT = Variable(
    name="HOCKET_FORCE_SPLIT",
    default="0",
    meaning="over 1: split every step into so many ubatches, whatever the thresholds and also on one rank (for tests)",
)
DBO_COMM_SMS = Variable(
    name="HOCKET_DBO_COMM_SMS",
    default="20",
    meaning="multiprocessors of a GPU that a split step leaves to transfers, at most what they can use; compute gets "
    "the rest; 0: both take what they find",
)
DBO_GREEN_CONTEXT = Variable(
    name="HOCKET_DBO_GREEN_CONTEXT",
    default="0",
    meaning="1: all compute of a split step keeps to its share, in a green context; 0: only kernels that can be told",
)
FP8 = Variable(
    name="HOCKET_FP8", default="1", meaning="0: checkpoints in fp8 are expanded although fp8 runs here (to compare)"
)
KERNELS = Variable(
    name="HOCKET_KERNELS",
    default="auto",
    meaning="auto: fused Triton kernels on a GPU; torch: PyTorch's own, one operation at a time",
)
MLA_DECODE = Variable(
    name="HOCKET_MLA_DECODE",
    default="auto",
    meaning="what captured latent decodes run with: flashinfer; triton: Hocket's own kernel; auto: the latter for few "
    "heads (up to 32), where it is faster",
)
KEEP_KERNELS = Variable(
    name="HOCKET_KEEP_KERNELS",
    default="1",
    meaning="0: Triton works out at every launch what repeated launches share (to compare)",
)
SHARED_EXPERTS_STREAM = Variable(
    name="HOCKET_SHARED_EXPERTS_STREAM",
    default="1",
    meaning="0: captured decode steps compute the shared experts on the stream of everything else (to compare)",
)
API_KEY = Variable(
    name="HOCKET_API_KEY", default="", meaning="a key that requests to `hocket serve` must bring (empty: none)"
)
CLUSTER_SECRET = Variable(
    name="HOCKET_CLUSTER_SECRET",
    default="",
    meaning="the same text on all hosts of `hocket serve`: only who knows it can join or listen (empty: anybody)",
)


def set_up_logging(who: str) -> None:
    """Log to standard error with `who` in front. Raises ConfigError for a level that does not exist."""
    level = LOG_LEVEL.get().upper()
    if level not in logging.getLevelNamesMapping():
        raise ConfigError(LOG_LEVEL.name, level, "DEBUG, INFO, WARNING, ERROR")
    logging.basicConfig(level=level, format=f"{who}: %(levelname)s: %(message)s", force=True)
