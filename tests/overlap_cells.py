"""Cells of the overlap grid: engine configurations, and requests whose steps have a wanted number of tokens per rank.

`expected` says how every step of a cell must be cut, by a small model of its own that calls nothing of hocket. Knows
no answers.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import checkpoints
import more_checkpoints
from pairwise import Cell, cover, full_grid, pairwise_cover

NUM_RANKS = 2
NUM_TOKENS = 3
"""Most output tokens of a request."""
BLOCK = 4
PREFIX_LEN, HEAD_LEN = 2 * BLOCK, BLOCK
"""Tokens that all prompts of a run share when prefixes are cached, and that those of a rank and a cell share."""
BUDGET = 128
CHUNK = 16
SHORT_LEN = 2

SIZES = (
    (8, 8), (8, 7), (8, 1), (1, 8), (1, 1), (0, 8), (8, 0), (2, 2), (3, 3), (33, 0), (64, 1), (64, 2), (2, 64), (40, 3)
)  # fmt: skip
PHASES = ("prefill", "decode", "mixed")
Case = tuple[tuple[int, int], str]
CASES: list[Case] = list(itertools.product(SIZES, PHASES))

FAMILIES: dict[str, tuple[str, ...]] = {
    "v2": ("v2", "v2-tied", "v2-linear", "v2-bias"),
    "v2-groups": ("v2-groups", "v2-yarn", "v2-yarn-plain"),
    "v3": ("v3", "v3-tied", "v3-yarn", "v3-halves", "v3-no-groups", "v3-yarn-equal-ranks"),
    "qwen3": ("qwen3", "qwen3-no-norm", "qwen3-yarn", "qwen3-many-experts"),
    "qwen3-dense": ("qwen3-dense-layer", "qwen3-first-dense", "qwen3-two-experts"),
}
"""Checkpoints by family; a configuration of a family has one of them. (OLMoE is not of Hocket's own models.)"""
assert {name for names in FAMILIES.values() for name in names} == {
    *checkpoints.CONFIGS, *more_checkpoints.CONFIGS
} - {"olmoe"}  # fmt: skip

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "transport": ("torch", "allgather_reducescatter", "emulated-torch", "emulated-allgather_reducescatter"),
    "executor": ("greenlet", "thread"),
    "ubatches": (1, 2, 3, 4),
    "prefix": (False, True),
    "chunk": (0, CHUNK),
    "threshold": ("least", "8", "forced"),
}


def allowed(config: Cell) -> bool:
    """With one ubatch there is nothing to execute in turns and nothing to compare with a threshold or to force."""
    return config["ubatches"] > 1 or (config["executor"] == "greenlet" and config["threshold"] == "least")


def with_checkpoint(config: Cell) -> Cell:
    """The configuration with one of its family's checkpoints, always the same one."""
    draw = random.Random(config_id(config))
    return {**config, "checkpoint": draw.choice(FAMILIES[config["family"]])}


def config_id(config: Cell) -> str:
    return "-".join(str(value) for value in config.values())


GRID = [with_checkpoint(config) for config in full_grid(DIMENSIONS, allowed)]
"""Every configuration."""


def engine_options(config: Cell) -> dict[str, Any]:
    """What the configuration has in common with the one without overlap that it is compared with."""
    emulated = config["transport"].startswith("emulated-")
    return {
        "all2all_backend": config["transport"].removeprefix("emulated-"),
        "enable_prefix_caching": config["prefix"],
        "long_prefill_token_threshold": config["chunk"],
        "max_num_seqs": 72,
        "max_num_batched_tokens": BUDGET,
        "block_size": BLOCK,
        "max_model_len": 192,
        **({"emulate_link_gb_per_s": 1.0, "emulate_link_latency_us": 50.0} if emulated else {}),
    }


def overlap_options(config: Cell) -> dict[str, Any]:
    """With forced splits the environment says how many ubatches, see `forced_split`; thresholds stay out of reach."""
    if config["threshold"] == "forced":
        return {"ubatch_executor": config["executor"]}
    least = threshold_of(config)
    return {
        "ubatch_size": config["ubatches"],
        "ubatch_executor": config["executor"],
        "dbo_decode_token_threshold": least,
        "dbo_prefill_token_threshold": least,
    }


def forced_split(config: Cell) -> str:
    """The value of HOCKET_FORCE_SPLIT."""
    return str(config["ubatches"]) if config["threshold"] == "forced" else "0"


def threshold_of(config: Cell) -> int:
    return {"least": config["ubatches"], "8": 8, "forced": 0}[config["threshold"]]


# -- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """One request of a cell.

    rank: where it runs. num_new: prompt tokens that must be computed. head: prompts with the same head begin alike,
    where their length allows; number: which of those. max_tokens: of output. num_cached: prompt tokens that are found
    in the cache.
    """

    rank: int
    num_new: int
    head: int | None
    number: int
    max_tokens: int
    num_cached: int = 0


def asks_of(size: tuple[int, int], phase: str, config: Cell) -> list[Ask]:
    """Requests that, arriving together, come to a step of `phase` with `size` tokens per rank.

    Prefill: their first step. Decode: all steps after the first. Mixed: the second step, in which the short prompts
    decode while the others, too long for one step or longer than a chunk, go on.
    """
    return [ask for rank, tokens in enumerate(size) if tokens for ask in _of_rank(rank, tokens, size, phase, config)]


def _of_rank(rank: int, tokens: int, size: tuple[int, int], phase: str, config: Cell) -> Iterator[Ask]:
    head = (SIZES.index(size) * len(PHASES) + PHASES.index(phase)) * NUM_RANKS + rank
    if phase == "decode":
        yield from _shorts(rank, tokens, config)
    elif phase == "prefill":
        yield from _longs(rank, _prefill_lens(tokens, config["chunk"]), head, config)
    else:
        num_decodes = _num_decodes(rank, tokens)
        yield from _shorts(rank, num_decodes, config)
        left = tokens - num_decodes
        first_step = BUDGET - SHORT_LEN * num_decodes
        lens = _in_chunks(left, CHUNK) if config["chunk"] else [first_step + left] if left else []
        yield from _longs(rank, lens, head, config)


def _num_decodes(rank: int, tokens: int) -> int:
    """Decodes among a rank's tokens of a mixed step. A rank with one token has a decode, or else a prefill."""
    return max(1, tokens // 4) if tokens > 1 else 1 - rank


def _prefill_lens(tokens: int, chunk: int) -> list[int]:
    """New tokens of prompts that bring `tokens` to the first step: of two prompts, or of chunks that go on after it."""
    if chunk and tokens >= chunk:
        return [chunk + 4] * (tokens // chunk) + [tokens % chunk] * (tokens % chunk > 0)
    return [tokens - tokens // 3, tokens // 3] if tokens >= 6 else [tokens]


def _in_chunks(tokens: int, chunk: int) -> list[int]:
    """New tokens of prompts that bring `tokens` to the second step after a whole chunk each in the first."""
    return [chunk + min(chunk, tokens - done) for done in range(0, tokens, chunk)]


def _shorts(rank: int, count: int, config: Cell) -> Iterator[Ask]:
    """Prompts too short to fill a block, so that none is found in the cache but what all share."""
    cached = PREFIX_LEN if config["prefix"] else 0
    for number in range(count):
        yield Ask(rank, SHORT_LEN, None, 64 * rank + number, NUM_TOKENS, cached)


def _longs(rank: int, lens: Sequence[int], head: int, config: Cell) -> Iterator[Ask]:
    """Where prefixes are cached, the first one writes the block that the others read in the same step."""
    cached = PREFIX_LEN if config["prefix"] else 0
    for number, num_new in enumerate(lens):
        reads_head = config["prefix"] and number > 0 and lens[0] >= HEAD_LEN
        yield Ask(rank, num_new, head, number, NUM_TOKENS - 1, cached + (HEAD_LEN if reads_head else 0))


# -- what must happen -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A request's tokens in a step."""

    num_tokens: int
    is_prefill: bool


Step = list[list[Part]]
"""By rank."""


def steps_of(asks: Sequence[Ask], chunk: int) -> list[Step]:
    """The steps of a cell: running decodes first, then prompts in order of arrival, up to a chunk each."""
    ranks = [list(_rank_steps([a for a in asks if a.rank == rank], chunk)) for rank in range(NUM_RANKS)]
    return [list(parts) for parts in itertools.zip_longest(*ranks, fillvalue=[])]


def _rank_steps(asks: Sequence[Ask], chunk: int) -> Iterator[list[Part]]:
    prompt = [ask.num_new for ask in asks]
    output = [ask.max_tokens for ask in asks]
    while any(output):
        decoding = [i for i, left in enumerate(prompt) if not left and output[i]]
        parts = [Part(1, False) for _ in decoding]
        budget = BUDGET - len(parts)
        for i in [i for i, left in enumerate(prompt) if left]:
            taken = min(prompt[i], budget, chunk or prompt[i])
            if not taken:
                break
            parts.append(Part(taken, True))
            budget -= taken
            prompt[i] -= taken
            output[i] -= not prompt[i]
        for i in decoding:
            output[i] -= 1
        yield parts


def phase_of(parts: Sequence[Part]) -> str:
    kinds = {part.is_prefill for part in parts}
    return {frozenset(): "idle", frozenset({True}): "prefill", frozenset({False}): "decode"}.get(
        frozenset(kinds), "mixed"
    )


def tokens_of(step: Step) -> list[int]:
    return [sum(part.num_tokens for part in parts) for parts in step]


def reason_of(step: Step, config: Cell) -> str:
    """Every prefix that these requests read in a step lies before what they write, so nobody ever refuses."""
    if config["ubatches"] == 1:
        return "disabled"
    reached = all(tokens >= threshold_of(config) for tokens in tokens_of(step) if tokens)
    return "split" if reached else "below_threshold"


def cuts_of(step: Step, ubatches: int) -> list[list[int]]:
    """Each rank's tokens by ubatch: cut at the same rows, in equal parts of the largest rank's tokens."""
    most = max(tokens_of(step))
    ends = [most // ubatches * i for i in range(ubatches)] + [most]
    return [[min(b, tokens) - min(a, tokens) for a, b in itertools.pairwise(ends)] for tokens in tokens_of(step)]


def cuts_a_request(step: Step, ubatches: int) -> bool:
    """Whether some rank has a request with tokens in two ubatches."""
    for parts, cuts in zip(step, cuts_of(step, ubatches), strict=True):
        between = set(itertools.accumulate(part.num_tokens for part in parts))
        if any(0 < end < sum(cuts) and end not in between for end in itertools.accumulate(cuts)):
            return True
    return False


@dataclass
class Expected:
    """One rank's counters after a cell; phases without the steps in which the rank had nothing to do."""

    num_steps: int
    reasons: dict[str, dict[str, int]]
    ubatch_tokens: dict[str, int]


def expected(asks: Sequence[Ask], config: Cell) -> list[Expected]:
    """By rank. After the last step one more follows in which the ranks see that all are done."""
    steps = steps_of(asks, config["chunk"])
    found = []
    for rank in range(NUM_RANKS):
        reasons: dict[str, Counter[str]] = {}
        cuts: Counter[str] = Counter()
        for step in steps:
            reason = reason_of(step, config)
            if step[rank]:
                reasons.setdefault(phase_of(step[rank]), Counter())[reason] += 1
            if reason == "split":
                cuts["+".join(map(str, cuts_of(step, config["ubatches"])[rank]))] += 1
        found.append(Expected(len(steps) + 1, {phase: dict(r) for phase, r in reasons.items()}, dict(cuts)))
    return found


def main_step(size: tuple[int, int], phase: str, config: Cell) -> Step:
    """The step that has the cell's size and phase."""
    return steps_of(asks_of(size, phase, config), config["chunk"])[0 if phase == "prefill" else 1]


# -- the cover ------------------------------------------------------------------------------------------------------


def choose() -> list[tuple[Cell, list[Case]]]:
    """Few configurations with some cases each, such that every two values of any two dimensions meet.

    "way", how many ubatches and whether the cell's own step is split, is a dimension too, so that each size, phase,
    model, transport and executor is really split with each number of ubatches. Checkpoints that no
    configuration drew get one size in all phases.
    """
    configs = [with_checkpoint(config) for config in pairwise_cover(DIMENSIONS, allowed)]
    cells = []
    for number, config in enumerate(configs):
        for size, phase in CASES:
            way = (config["ubatches"], reason_of(main_step(size, phase, config), config))
            cells.append({**config, "size": size, "phase": phase, "way": way, "config": number})
    ignored = ("checkpoint", "config", "ubatches")
    chosen = cover(cells, lambda cell: {name: value for name, value in cell.items() if name not in ignored})
    cases: dict[int, list[Case]] = {number: [] for number in range(len(configs))}
    for cell in chosen:
        cases[cell["config"]].append((cell["size"], cell["phase"]))
    found = [(configs[number], sorted(of_config)) for number, of_config in cases.items() if of_config]
    rest = {name for names in FAMILIES.values() for name in names} - {config["checkpoint"] for config, _ in found}
    for name in sorted(rest):
        config = next(c for c in GRID if c["checkpoint"] == name and c["ubatches"] > 1 and c["threshold"] == "least")
        found.append((config, [(SIZES[1], phase) for phase in PHASES]))
    return found
