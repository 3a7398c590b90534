"""A step that was launched and whose result may still be on its way. Knows nothing of how steps run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.outputs import TokenLogprobs
from hocket.scheduler.batch import Batch, ScheduledRequest
from hocket.worker.inputs import Sources


@dataclass
class StepResult:
    """What executing a batch gave, aligned with `batch.requests`: None where the step did not end in a sample."""

    token_ids: list[int | None]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[str, list[TokenLogprobs | None]]


class HostIds:
    """Sampled ids int64 [N] on their way from the device to the host."""

    def __init__(self, ids: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._ids = ids
        if ids.is_cuda:
            self._ids = torch.empty(len(ids), dtype=torch.int64, pin_memory=True)
            self._ids.copy_(ids, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[int]:
        """The ids, once the step that samples them is over."""
        if self._event is not None:
            self._event.synchronize()
        ids: list[int] = self._ids.tolist()
        return ids


@dataclass(slots=True)
class InFlight:
    """A step that was launched: on a GPU it may still be running. rows: the requests that it samples for.

    can_wait: the next step may be launched before this one's tokens are known on the host.
    """

    batch: Batch
    rows: list[ScheduledRequest]
    logits: Tensor
    prompt_logits: Tensor | None
    ids: HostIds
    can_wait: bool

    @property
    def sources(self) -> Sources:
        return {row.request: idx for idx, row in enumerate(self.rows)}
