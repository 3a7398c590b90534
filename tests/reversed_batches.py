"""Makes ranks schedule a step's prefills in reverse, so that a reader stands before its writer. For tests only.

No scheduler of ours does that: it shows what the veto is for.
"""

from __future__ import annotations

from hocket.scheduler.batch import Batch, BatchBuilder


def install() -> None:
    build = BatchBuilder.build

    def build_reversed(self: BatchBuilder) -> Batch:
        batch = build(self)
        decodes = [row for row in batch.requests if not row.is_prefill]
        prefills = [row for row in batch.requests if row.is_prefill]
        return Batch((*decodes, *reversed(prefills)), batch.num_tokens, batch.num_prefill_tokens)

    BatchBuilder.build = build_reversed  # type: ignore[method-assign]
