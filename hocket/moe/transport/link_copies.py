"""Delays on a GPU that take no multiprocessor: a copy engine brings so many bytes from the host's memory. Knows no
transfers.

A kernel that waits does disturb: products that fill a multiprocessor's memory find no room beside even one warp, and
take turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.ubatch.stream_lane import recorded

PIECE_BYTES = 32 << 20
"""Longer delays are several copies."""
_SMALL_BYTES = PIECE_BYTES // 16
_REPEATS = 5


def rate_of(small_s: float, large_s: float) -> tuple[float, float]:
    """Bytes per second, and the seconds of a copy of nothing, from those of _SMALL_BYTES and of PIECE_BYTES."""
    if large_s <= small_s:  # delays would have no length, and nobody would see it in the results
        small, large = (
            f"{size >> 20} MiB took {seconds * 1e6:.0f} µs"
            for size, seconds in ((_SMALL_BYTES, small_s), (PIECE_BYTES, large_s))
        )
        raise HocketError(
            f"no link can be emulated by copies from the host: {small}, {large}; is it too busy? Try again"
        )
    bytes_per_s = (PIECE_BYTES - _SMALL_BYTES) / (large_s - small_s)
    return bytes_per_s, max(0.0, small_s - _SMALL_BYTES / bytes_per_s)


class CopyDelay:
    """A delay has a beginning (`mark`) on the current stream, is started by the time its length is known, and whoever
    needs its end waits for it on his stream. One runs after the other. How long copies take is measured once, when the
    object is made: the least of several times, so that delays are rather longer than shorter than asked for.

    Raises:
        HocketError: that could not be measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.index
        self._source = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._sink = torch.empty(PIECE_BYTES, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.bytes_per_s, self._least_s = rate_of(self._seconds_of(_SMALL_BYTES), self._seconds_of(PIECE_BYTES))

    def _seconds_of(self, num_bytes: int) -> float:
        """How long the current stream waits for a delay of so many bytes, the way to the other stream and back
        included."""
        found: list[float] = []
        for _ in range(_REPEATS + 1):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            self.wait(self._started(self.mark(), num_bytes))
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) * 1e-3)
        return min(found[1:])

    def _copy(self, num_bytes: int) -> None:
        caller = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._stream)
        try:
            while num_bytes > 0:
                piece: Tensor = self._source[:num_bytes]
                self._sink[: len(piece)].copy_(piece, non_blocking=True)
                num_bytes -= len(piece)
        finally:
            torch.cuda.set_stream(caller)

    def mark(self) -> torch.cuda.Event:
        """Time begins when the current stream comes here."""
        return recorded(torch.cuda.current_stream(self._device))

    def start(self, mark: torch.cuda.Event, seconds: float) -> torch.cuda.Event:
        """What ends `seconds` after the mark, and after the delay before it."""
        return self._started(mark, round((seconds - self._least_s) * self.bytes_per_s))

    def _started(self, mark: torch.cuda.Event, num_bytes: int) -> torch.cuda.Event:
        self._stream.wait_event(mark)
        self._copy(num_bytes)
        return recorded(self._stream)

    def wait(self, end: torch.cuda.Event) -> None:
        """The current stream goes on after that."""
        torch.cuda.current_stream(self._device).wait_event(end)
