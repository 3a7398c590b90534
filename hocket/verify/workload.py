"""What is asked in a verification: prompts of different lengths, some with a beginning in common. Torch-free."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from hocket.bench.throughput import prompt_lines

LENGTHS = (0.5, 0.5, 0.2, 1.0, 0.3, 0.75)
"""Lengths of a rank's prompts as shares of the longest, over and over. The short ones decode while the long ones are
still computed, and the second has the beginning of the first, which it reads in the step that writes it."""
_SHORTER = 4
"""Ranks' lengths differ by less than this, so that some of them must pad."""
SHARED = 0.8
"""Share of the second prompt that is the first one's."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """num_prompts: over all ranks. prompt_len: of the longest. output_len: tokens to generate for each. prompts_file:
    lines of text instead."""

    num_prompts: int
    prompt_len: int
    output_len: int
    prompts_file: str | None = None

    def prompts(self, num_ranks: int, vocab_size: int, seed: int) -> list[Any]:
        """Prompt i is for rank i % num_ranks. Random ids, the same ones for the same seed; or each line of the file
        once.

        Raises:
            ConfigError: the file cannot be read.
        """
        if self.prompts_file is not None:
            return list(prompt_lines(self.prompts_file))
        draw, made = random.Random(seed), list[list[int]]()
        for i in range(self.num_prompts):
            of_rank, rank = divmod(i, num_ranks)
            length = max(1, round(LENGTHS[of_rank % len(LENGTHS)] * self.prompt_len) - rank % _SHORTER)
            head: list[int] = []
            if of_rank % len(LENGTHS) == 1:
                head = made[i - num_ranks][: round(SHARED * length)]
            made.append(head + [draw.randrange(vocab_size) for _ in range(length - len(head))])
        return [{"prompt_token_ids": ids} for ids in made]
