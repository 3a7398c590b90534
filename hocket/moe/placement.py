"""Which rank holds which experts, as plain integers. Knows no tensors and no process groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from hocket.config.backends import PLACEMENTS
from hocket.errors import ConfigError


@dataclass(frozen=True)
class ExpertPlacement:
    """Divides `num_experts` over `num_ranks`; any counts, also fewer experts than ranks (some ranks then hold none).

    linear: neighbours together, the first `num_experts % num_ranks` ranks hold one more; round_robin: expert e is on
    rank e % num_ranks. Raises ConfigError for a count below 1 or an unknown strategy.
    """

    num_experts: int
    num_ranks: int
    strategy: str = "linear"

    def __post_init__(self) -> None:
        for field in ("num_experts", "num_ranks"):
            if getattr(self, field) < 1:
                raise ConfigError(field, getattr(self, field), "at least 1")
        if self.strategy not in PLACEMENTS:
            raise ConfigError("expert_placement_strategy", self.strategy, ", ".join(PLACEMENTS))

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Ids of the experts on `rank`, in the order of their local indices."""
        return self._by_rank[rank]

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """[num_experts] the rank of each expert."""
        table = [0] * self.num_experts
        for rank, experts in enumerate(self._by_rank):
            for expert in experts:
                table[expert] = rank
        return tuple(table)

    @cached_property
    def local_idx(self) -> tuple[int, ...]:
        """[num_experts] the index of each expert among those of its rank."""
        table = [0] * self.num_experts
        for experts in self._by_rank:
            for index, expert in enumerate(experts):
                table[expert] = index
        return tuple(table)

    def local_id_of(self, rank: int) -> tuple[int, ...]:
        """[num_experts + 1] index on `rank` of each expert; -1 for those of other ranks and, at the end, for none."""
        placed = zip(self.rank_of, self.local_idx, strict=True)
        return *(index if owner == rank else -1 for owner, index in placed), -1

    @cached_property
    def _by_rank(self) -> tuple[tuple[int, ...], ...]:
        if self.strategy == "round_robin":
            return tuple(tuple(range(rank, self.num_experts, self.num_ranks)) for rank in range(self.num_ranks))
        size, extra = divmod(self.num_experts, self.num_ranks)
        starts = [rank * size + min(rank, extra) for rank in range(self.num_ranks + 1)]
        return tuple(tuple(range(start, end)) for start, end in pairwise(starts))
