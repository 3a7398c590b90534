"""Cells of the overlap grid: engine configurations, and requests whose steps have a wanted number of tokens per rank.

`expected` says how every step of a cell must be cut, by a small model of its own that calls nothing of hocket. Knows
no answers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pairwise import Cell

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
FORCED_SIZES = ((1,), (8,), (40,), (8, 7, 1), (0, 3, 64), (1, 0, 1, 2), (8, 33, 0, 5))
"""For forced splits on another number of ranks than two."""
MOST_RANKS = 4
Size = tuple[int, ...]
Case = tuple[Size, str]
CASES: list[Case] = list(itertools.product(SIZES, PHASES))


def engine_options(config: Cell) -> dict[str, Any]:
    """What the configuration has in common with the one without overlap that it is compared with."""
    emulated = config["transport"].startswith("emulated-")
    return {
        **({"all2all_backend": config["transport"].removeprefix("emulated-")} if ranks_of(config) > 1 else {}),
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


def ranks_of(config: Cell) -> int:
    return int(config.get("ranks", 2))


def forced_split(config: Cell) -> str:
    """The value of HOCKET_FORCE_SPLIT."""
    return str(config["ubatches"]) if config["threshold"] == "forced" else "0"


def threshold_of(config: Cell) -> int:
    return int({"least": config["ubatches"], "8": 8, "forced": 0}[config["threshold"]])


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


def asks_of(size: Size, phase: str, config: Cell) -> list[Ask]:
    """Requests that, arriving together, come to a step of `phase` with `size` tokens per rank.

    Prefill: their first step. Decode: all steps after the first. Mixed: the second step, in which the short prompts
    decode while the others, too long for one step or longer than a chunk, go on.
    """
    return [ask for rank, tokens in enumerate(size) if tokens for ask in _of_rank(rank, tokens, size, phase, config)]


def _of_rank(rank: int, tokens: int, size: Size, phase: str, config: Cell) -> Iterator[Ask]:
    head = ((*SIZES, *FORCED_SIZES).index(size) * len(PHASES) + PHASES.index(phase)) * MOST_RANKS + rank
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


def steps_of(asks: Sequence[Ask], config: Cell) -> list[Step]:
    """The steps of a cell: running decodes first, then prompts in order of arrival, up to a chunk each."""
    by_rank = [[ask for ask in asks if ask.rank == rank] for rank in range(ranks_of(config))]
    ranks = [list(_rank_steps(of_rank, config["chunk"])) for of_rank in by_rank]
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
    """By rank. Where there are several, one more step follows the last, in which they see that all are done."""
    steps = steps_of(asks, config)
    num_ranks = ranks_of(config)
    found = []
    for rank in range(num_ranks):
        reasons: dict[str, Counter[str]] = {}
        cuts: Counter[str] = Counter()
        for step in steps:
            reason = reason_of(step, config)
            if step[rank]:
                reasons.setdefault(phase_of(step[rank]), Counter())[reason] += 1
            if reason == "split":
                cuts["+".join(map(str, cuts_of(step, config["ubatches"])[rank]))] += 1
        num_steps = len(steps) + (num_ranks > 1)
        found.append(Expected(num_steps, {phase: dict(r) for phase, r in reasons.items()}, dict(cuts)))
    return found


def main_step(size: Size, phase: str, config: Cell) -> Step:
    """The step that has the cell's size and phase."""
    return steps_of(asks_of(size, phase, config), config)[0 if phase == "prefill" else 1]
