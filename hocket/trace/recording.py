"""What was recorded of a run, as one value: its steps on every rank, and where they come from. Knows no file format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hocket.trace import clocks
from hocket.trace.figures import StepFigures, step_figures
from hocket.trace.spans import COMPUTE, EVENTS, KERNELS, Stage, Step

NO_COMM = "no communication: each rank has all experts, so nothing moves"


@dataclass(frozen=True, slots=True)
class Recording:
    """`ranks`: by rank, the recorded steps, the same number on each; all times are of one host's clock.

    about: plain values, among them `title`, one line that says what ran and, where the link was emulated, that it was,
    `notes`, lines without which its times would be misread, and `first_rank`, where these are not all ranks.
    """

    about: dict[str, Any]
    ranks: list[list[Step]]

    @property
    def title(self) -> str:
        return str(self.about.get("title", ""))

    @property
    def notes(self) -> list[str]:
        return [str(note) for note in self.about.get("notes", ())]

    @property
    def has_comm(self) -> bool:
        """Whether anything moved between ranks."""
        return any(span.lane != COMPUTE for steps in self.ranks for step in steps for span in step.spans)

    @property
    def first_rank(self) -> int:
        """The number of the first of `ranks` among all."""
        return int(self.about.get("first_rank", 0))

    @property
    def base_ns(self) -> int:
        """When the first step began."""
        return min((step.start_ns for steps in self.ranks for step in steps), default=0)

    @property
    def num_ubatches(self) -> int:
        """Of the step with most."""
        return max((step.num_ubatches for steps in self.ranks for step in steps), default=1)

    def figures(self) -> list[StepFigures]:
        """By rank."""
        return [step_figures(steps) for steps in self.ranks]


def recording_of(about: dict[str, Any], ranks: list[list[Step]], *, moves: bool) -> Recording:
    """What ranks have recorded, the steps that all of them have, on one clock. moves: whether they share experts; else
    they step by themselves, and what their layers call transfers moves nothing and takes no time worth showing.
    """
    if moves:  # while they work they are told to record at different times
        common = set.intersection(*({step.number for step in steps} for steps in ranks))
        ranks = [[step for step in steps if step.number in common] for steps in ranks]
        notes = clocks.align(ranks)
    else:
        count = min(len(steps) for steps in ranks)
        ranks = [steps[:count] for steps in ranks]
        notes = [NO_COMM, *clocks.unaligned(ranks)]
        for step in (step for steps in ranks for step in steps):
            step.spans = [span for span in step.spans if span.lane == COMPUTE]
    return Recording(about | {"notes": notes + _of_gpus(ranks, by_copies=about.get("by_copies", False))}, ranks)


def _of_gpus(ranks: list[list[Step]], *, by_copies: bool) -> list[str]:
    """Where times of GPUs are from. by_copies: whether copies move tokens, which a profile of a graph does not tell
    from others."""
    steps = [step for steps in ranks for step in steps]
    notes = []
    if any(step.source == KERNELS for step in steps):
        notes.append("times are those of kernels, by torch's profiler: gaps between them are stalls")
    if any(step.source == EVENTS for step in steps):
        notes.append("times are those of CUDA events, from launch to launch: gaps between kernels count as compute")
    if any(span.stage is Stage.KERNEL for step in steps for span in step.spans):
        notes.append("decodes are replays of CUDA graphs, whose kernels have no stages (--enforce-eager shows stages)")
        if by_copies:
            notes.append("copies move tokens, and in a graph look like compute's: communication is more than is shown")
    return notes


def typical_step(recording: Recording) -> int:
    """The number of the step whose time, over all ranks, is the median."""
    times = [sum(step.stop_ns - step.start_ns for step in ranks) for ranks in zip(*recording.ranks, strict=True)]
    return sorted(range(len(times)), key=times.__getitem__)[(len(times) - 1) // 2]


def layers_of(step: Step) -> list[int]:
    """The sparse layers of a step that were recorded from dispatch to combine, in order."""
    return sorted({span.layer for span in step.spans if span.part == "flight" or span.stage is Stage.EXPERTS})


def middle_layer(step: Step) -> int:
    """A sparse layer in the steady state: neither the first nor the last where there are three."""
    layers = layers_of(step)
    return layers[len(layers) // 2] if layers else 0


def window_of(steps: list[Step], layer: int) -> tuple[int, int]:
    """From the start of a sparse layer's first span to the end of its last one, over the same step of all ranks."""
    spans = [span for step in steps for span in step.spans if span.layer == layer]
    if not spans:
        return min(step.start_ns for step in steps), max(step.stop_ns for step in steps)
    return min(span.start_ns for span in spans), max(span.stop_ns for span in spans)
