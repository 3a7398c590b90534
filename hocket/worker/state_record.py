"""Keeps the hidden states of a run over given tokens, layer by layer. Knows nothing of what they are compared with.

Shapes: T tokens of a step on this rank, D hidden, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hocket.channel.messages import StateRow, States
from hocket.models.base import CausalLM, DecoderLayer, UBatchInputs
from hocket.scheduler.batch import Batch, ScheduledRequest
from hocket.ubatch import context as ubatch


class StateRecord:
    """Hooks on the model's layers, from now on and for as long as the model lives; for looking, not for speed.

    forced: by request, the tokens it is given in place of those sampled, so that all runs go over the same text.
    """

    def __init__(self, model: CausalLM, forced: Mapping[str, Sequence[int]]) -> None:
        self._forced = forced
        self._num_layers, self._hidden_size = len(model.layers), model.config.hidden_size
        self._rows: list[StateRow] = []
        self._steps: list[Tensor] = []  # fp32 [L, 2, T, D] each, on the host
        self._starts: list[int] = []  # of the running step's ubatches
        for idx, layer in enumerate(model.layers):
            assert isinstance(layer, DecoderLayer)
            layer.attention.register_forward_hook(self._hook(idx, 0))
            layer.register_forward_hook(self._hook(idx, 1))

    def begin_step(self, batch: Batch, ubatches: tuple[UBatchInputs, ...]) -> None:
        """The next step computes `batch`, cut into `ubatches`, whose tokens are the batch's in order."""
        counts = [inputs.layout.num_tokens for inputs in ubatches]
        self._starts = [0, *accumulate(counts)]
        of_row = [idx for idx, count in enumerate(counts) for _ in range(count)]
        tokens = ((s.request.request_id, s.start + i) for s in batch.requests for i in range(s.num_tokens))
        step, phase = len(self._steps), batch.phase
        for (request_id, position), idx in zip(tokens, of_row, strict=True):
            self._rows.append(StateRow(request_id, position, step, phase, idx, len(ubatches)))
        # Not a number until a layer has said otherwise: what is never written differs from everything.
        shape = (self._num_layers, 2, batch.num_tokens, self._hidden_size)
        self._steps.append(torch.full(shape, torch.nan, dtype=torch.float32))

    def _hook(self, layer: int, place: int) -> Any:
        def keep(_module: Any, _args: Any, out: Tensor | tuple[Tensor | None, ...]) -> None:
            if not self._steps:
                return
            context = ubatch.current()
            idx = 0 if context is None else context.idx
            start, stop = self._starts[idx : idx + 2]
            summands = out if isinstance(out, tuple) else (out,)
            found = sum(part[: stop - start].float() for part in summands if part is not None)
            kept = self._steps[-1][layer, place, start:stop]
            if isinstance(found, Tensor) and found.shape == kept.shape:  # else it is not what the step was cut into
                kept.copy_(found)

        return keep

    def forced(self, rows: Sequence[ScheduledRequest], token_ids: list[int]) -> list[int]:
        """Tokens for `rows`: the forced ones where there are any (a token that is no number, −1, stays)."""
        result = []
        for row, token in zip(rows, token_ids, strict=True):
            number = row.start + row.num_tokens - row.request.num_prompt_tokens
            wanted = self._forced.get(row.request.request_id, ())
            result.append(wanted[number] if token >= 0 and number < len(wanted) else token)
        return result

    def layer(self, layer: int, rank: int) -> States:
        """Everything kept of a layer so far."""
        shape = (2, 0, self._hidden_size)
        values = torch.cat([torch.empty(shape), *(step[layer] for step in self._steps)], dim=1)
        return States(
            rank=rank,
            layer=layer,
            rows=self._rows,
            hidden_size=self._hidden_size,
            values=values.contiguous().numpy().tobytes(),
        )
