"""Steps of requests over a paged cache, for the tests of attention backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hocket.attention.base import AttentionMetadata

CPU = torch.device("cpu")


@dataclass
class Step:
    """Requests with `past` tokens in the cache and `new` ones in this step; `slot_bytes` decides how decodes group."""

    past: list[int]
    new: list[int]
    block_size: int
    num_padding: int
    slot_bytes: int = 1

    def metadata(self, generator: torch.Generator, device: torch.device = CPU) -> AttentionMetadata:
        """Blocks in random order, two of which nobody has; `generator` is on the CPU."""
        starts = [0]
        for n in self.new:
            starts.append(starts[-1] + n)
        lens = [p + n for p, n in zip(self.past, self.new, strict=True)]
        counts = [-(-n // self.block_size) for n in lens]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        table = torch.full((len(lens), max(counts) + 1), -9, dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        slots = [
            int(table[r, p // self.block_size]) * self.block_size + p % self.block_size
            for r in range(len(lens))
            for p in range(self.past[r], lens[r])
        ]
        return AttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            block_table=table.to(device),
            block_table_cpu=table,
            slot_mapping=torch.tensor(slots + [-1] * self.num_padding, dtype=torch.int64, device=device),
            query_start_loc_cpu=tuple(starts),
            seq_lens_cpu=tuple(lens),
            max_query_len=max(self.new),
            max_seq_len=max(lens),
            num_tokens=starts[-1],
        )

    @property
    def num_blocks(self) -> int:
        return sum(-(-(p + n) // self.block_size) for p, n in zip(self.past, self.new, strict=True)) + 2

    def slots_of(self, meta: AttentionMetadata, request: int, count: int) -> list[int]:
        size, table = self.block_size, meta.block_table_cpu[request].tolist()
        return [table[p // size] * size + p % size for p in range(count)]
