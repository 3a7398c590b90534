"""Where a step failed, as a number that the step exchange carries to the other ranks. Integers and names only."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.trace.spans import Stage

_STAGES = tuple(Stage)
_MOST_UBATCHES = 64


@dataclass(frozen=True, slots=True)
class FailedStage:
    """layer: sparse layers before it."""

    ubatch: int
    layer: int
    stage: Stage

    @property
    def code(self) -> int:
        """Never 0, which says that nothing failed."""
        return 1 + self.ubatch + _MOST_UBATCHES * (_STAGES.index(self.stage) + len(_STAGES) * self.layer)

    @classmethod
    def from_code(cls, code: int) -> FailedStage:
        rest, ubatch = divmod(code - 1, _MOST_UBATCHES)
        layer, stage = divmod(rest, len(_STAGES))
        return cls(ubatch, layer, _STAGES[stage])

    def __str__(self) -> str:
        return f"ubatch {self.ubatch}, sparse layer {self.layer}, {self.stage.label}"
