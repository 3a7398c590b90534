"""Divides a GPU's multiprocessors (SMs) between the transfers and the compute of a split step. Knows no kernel and no
transport: what can be limited is given as a `Limit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

from hocket.envs import DBO_COMM_SMS
from hocket.errors import ConfigError

Limit = Callable[[int], Callable[[], object]]
"""Lets something take at most so many multiprocessors from now on; what it returns brings back what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Multiprocessors for each side; together no more than there are."""

    comm_sms: int
    compute_sms: int


def comm_share(asked: int, max_sms: int | None, max_nccl_ctas: int | None) -> int:
    """How many of the multiprocessors that the user leaves to transfers they get: no more than they can use, which is
    what the transport says (`Transport.max_sms`) or, where that is None, NCCL's limit. 0: neither side is limited."""
    usable = max_nccl_ctas if max_sms is None else max_sms
    return asked if usable is None else min(asked, usable)


def divide(comm: int, total: int, step: int = 1) -> Shares | None:
    """The shares of a GPU with `total` multiprocessors of which transfers get `comm`; None: neither side is limited.
    Compute gets a multiple of `step`, rounded down.

    Raises:
        ConfigError: nothing would be left for compute.
    """
    if comm == 0:
        return None
    compute = (total - comm) // step * step
    if compute < 1:
        allowed = f"at most {total - step}: this GPU has {total} multiprocessors, and compute needs some"
        raise ConfigError(DBO_COMM_SMS.name, comm, allowed)
    return Shares(comm_sms=comm, compute_sms=compute)


class SmBudget:
    """Entered around a split step, and around its capture in a CUDA graph, whose kernels keep what they were launched
    with. Left, also by a failure, it has brought back what it found. Entered inside itself it does nothing more.

    shares None: nothing is limited. comm, compute: what the two sides are limited by. stream: entered last, the stream
    that compute runs on.
    """

    def __init__(
        self,
        shares: Shares | None,
        comm: Iterable[Limit] = (),
        compute: Iterable[Limit] = (),
        stream: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.shares = shares
        self._comm, self._compute, self._stream = tuple(comm), tuple(compute), stream
        self._is_entered = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        if self.shares is None or self._is_entered:
            yield
            return
        with ExitStack() as undo:
            self._is_entered = True
            undo.callback(self._leave)
            for limits, num_sms in ((self._comm, self.shares.comm_sms), (self._compute, self.shares.compute_sms)):
                for limit in limits:
                    undo.callback(limit(num_sms))
            undo.enter_context(self._stream())
            yield

    def _leave(self) -> None:
        self._is_entered = False


UNLIMITED = SmBudget(None)
"""Both sides take what they find."""
