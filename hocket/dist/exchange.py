"""The step exchange: before each step every rank learns every rank's column of the vote's table.

On one host it is a star over Unix stream sockets (rank 0 of the host is the hub): tens of microseconds, a time-out
that names who is late, and an end-of-file that names who died. Across hosts one leader per host exchanges through
torch.distributed. A column is int32 values of the same number on every rank; knows nothing of what they mean but that
the last one is the arrival time, which it fills in.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from hocket.dist.record import COMPUTES, IN_EXCHANGE, Record
from hocket.errors import RankLost

_HEADER = struct.Struct("=ii")  # status, rank it is about
_OK, _LATE, _DIED = 0, 1, 2
_LOOK_NS = 200_000
Column = Sequence[int]
Table = Sequence[Column]
Gather = Callable[[bytes], list[bytes]]


class StepExchange(Protocol):
    """Gives every rank the same table. Raises RankLost, naming the rank that is late or gone."""

    def exchange(self, column: Column) -> Table: ...

    def close(self) -> None: ...


def _pack(column: Column) -> bytes:
    values = array.array("i", column)
    values[-1] = now_us()
    return values.tobytes()


def _unpack(raw: bytes, num_rows: int) -> Table:
    values = array.array("i")
    values.frombytes(raw)
    return [values[i : i + num_rows] for i in range(0, len(values), num_rows)]


def now_us() -> int:
    """The host's monotonic clock in µs, folded into 31 bits (the same clock for all ranks of one host)."""
    return (time.monotonic_ns() // 1000) & 0x7FFFFFFF


class SoloExchange:
    """One rank: its own column is the table."""

    def exchange(self, column: Column) -> Table:
        return _unpack(_pack(column), len(column))

    def close(self) -> None:
        """Nothing to close."""


class Recorded:
    """An exchange that tells a record where the rank is."""

    def __init__(self, inner: StepExchange, record: Record) -> None:
        self._inner = inner
        self._record = record

    def exchange(self, column: Column) -> Table:
        self._record.enter(IN_EXCHANGE)
        table = self._inner.exchange(column)
        self._record.enter(COMPUTES)
        return table

    def close(self) -> None:
        self._inner.close()


class Hub:
    """The host's first rank: collects the columns of its host and sends everybody the whole table.

    `ranks`: global ranks on this host, the hub's own first. `gather`: given this host's columns, returns those of all
    hosts in host order; None on a single host.
    """

    def __init__(
        self,
        listener: socket.socket,
        ranks: list[int],
        timeout_s: float,
        gather: Gather | None = None,
    ) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._gather = gather
        self._leaves: dict[int, socket.socket] = {}
        self._listener = listener

    def accept(self, timeout_s: float) -> None:
        """Wait until every other rank of the host has connected."""
        deadline = time.monotonic() + timeout_s
        while len(self._leaves) < len(self._ranks) - 1:
            self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                leaf, _ = self._listener.accept()
            except TimeoutError:
                missing = ", ".join(str(r) for r in self._ranks[1:] if r not in self._leaves)
                raise RankLost(f"rank {missing} did not join the step exchange within {timeout_s:g} s") from None
            leaf.settimeout(timeout_s)
            self._leaves[struct.unpack("=i", _receive(leaf, 4))[0]] = leaf

    def exchange(self, column: Column) -> Table:
        columns = {self._ranks[0]: _pack(column)}
        deadline = time.monotonic() + self._timeout_s
        for rank in self._ranks[1:]:
            leaf = self._leaves[rank]
            try:
                leaf.settimeout(max(deadline - time.monotonic(), 0.001))
                columns[rank] = _receive(leaf, 4 * len(column))
            except TimeoutError:
                self._report(_LATE, rank)
                raise RankLost(_late(rank, self._timeout_s)) from None
            except (EOFError, OSError):
                self._report(_DIED, rank)
                raise RankLost(_died(rank)) from None
        raw = b"".join(columns[rank] for rank in self._ranks)
        if self._gather is not None:
            raw = b"".join(self._gather(raw))
        frame = _HEADER.pack(_OK, len(raw)) + raw
        for rank in self._ranks[1:]:
            try:
                self._leaves[rank].sendall(frame)
            except OSError:
                self._report(_DIED, rank)
                raise RankLost(_died(rank)) from None
        return _unpack(raw, len(column))

    def _report(self, status: int, rank: int) -> None:
        for other, leaf in self._leaves.items():
            if other != rank:
                with contextlib.suppress(OSError):
                    leaf.sendall(_HEADER.pack(status, rank))

    def close(self) -> None:
        for leaf in self._leaves.values():
            leaf.close()
        self._listener.close()


class Leaf:
    """Every other rank of the host."""

    def __init__(self, path: str, rank: int, hub_rank: int, connect_timeout_s: float, timeout_s: float) -> None:
        self._hub_rank = hub_rank
        self._timeout_s = timeout_s
        self._socket = _connect(path, hub_rank, connect_timeout_s)
        self._socket.sendall(struct.pack("=i", rank))
        # The hub itself names a late rank after `timeout_s`; wait a little longer so that its word arrives.
        self._socket.settimeout(timeout_s + min(timeout_s, 2.0))

    def exchange(self, column: Column) -> Table:
        try:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(_pack(column))  # even where the hub is gone, its last word may be waiting
            status, about = _HEADER.unpack(_receive(self._socket, _HEADER.size))
            if status == _OK:
                return _unpack(_receive(self._socket, about), len(column))
        except TimeoutError:
            raise RankLost(_late(self._hub_rank, self._timeout_s)) from None
        except (EOFError, OSError):
            raise RankLost(_died(self._hub_rank)) from None
        raise RankLost(_late(about, self._timeout_s) if status == _LATE else _died(about))

    def close(self) -> None:
        self._socket.close()


def listen(path: str) -> socket.socket:
    """A Unix stream socket at `path` that only this user can reach."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(mask)
    listener.listen(256)
    return listener


def _connect(path: str, hub_rank: int, timeout_s: float) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        candidate = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            candidate.connect(path)
            return candidate
        except OSError:
            candidate.close()
            if time.monotonic() > deadline:
                raise RankLost(f"rank {hub_rank} did not open the step exchange within {timeout_s:g} s") from None
            time.sleep(0.01)


def _receive(source: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Looks for them a moment before it sleeps: waking up costs more than the whole exchange."""
    data = _look(source, size) or source.recv(size, socket.MSG_WAITALL)
    while len(data) < size:
        if not data:
            raise EOFError
        more = source.recv(size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _look(source: socket.socket, size: int) -> bytes:
    """What has arrived within _LOOK_NS, b"" if nothing; gives the core away between looks."""
    fd, deadline = source.fileno(), time.perf_counter_ns() + _LOOK_NS
    while time.perf_counter_ns() < deadline:
        try:
            return os.read(fd, size)  # a socket with a time-out does not block; its own recv would wait in poll()
        except BlockingIOError:
            os.sched_yield()
    return b""


def _late(rank: int, timeout_s: float) -> str:
    return f"rank {rank} did not reach the step exchange within {timeout_s:g} s"


def _died(rank: int) -> str:
    return f"rank {rank} left the step exchange (its process ended)"
