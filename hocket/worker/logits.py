"""What a request's parameters do to its logits before sampling. Knows nothing of seeds, draws or log-probabilities.

Shapes: N rows of the batch, R rows that a step concerns, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hocket.host import sent
from hocket.request import Request

_FIRST_WIDTH = 256
"""Largest logits looked at first for top-p; all of them only if these do not hold the asked-for probability."""


def process_logits(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Masks, bias and penalties of all rows: fp32 [N, V]; `logits` itself when no row has any, else a changed copy.

    Order: allowed_token_ids; bad words, logit_bias and min_tokens; repetition, then frequency and presence penalties;
    json_schema.
    """
    rows = [i for i, request in enumerate(requests) if is_processed(request)]
    if not rows:
        return logits
    given, logits = logits, logits.clone()
    _apply_allowed(logits, [(i, requests[i]) for i in rows if requests[i].params.allowed_token_ids is not None])
    _apply_bans(logits, [(i, banned_ids(requests[i])) for i in rows])
    _apply_bias(logits, [(i, bias) for i in rows if (bias := requests[i].params.logit_bias)])
    _apply_repetition(logits, [(i, requests[i]) for i in rows if requests[i].params.repetition_penalty != 1])
    _apply_counts(logits, [(i, requests[i]) for i in rows if _has_count_penalty(requests[i])])
    for i in rows:
        if requests[i].follower is not None:
            logits[i] = _within_schema(logits[i], given[i], requests[i])
    return logits


def is_processed(request: Request) -> bool:
    """Whether the request's parameters change its next token's logits."""
    params = request.params
    return bool(
        params.allowed_token_ids is not None
        or request.bad_words_ids
        or params.logit_bias
        or params.repetition_penalty != 1
        or _has_count_penalty(request)
        or request.follower is not None
        or params.min_tokens > request.num_output_tokens
    )


def _has_count_penalty(request: Request) -> bool:
    return request.params.frequency_penalty != 0 or request.params.presence_penalty != 0


def banned_ids(request: Request) -> set[int]:
    """Token ids the request may not produce now: the last token of a bad word whose start is there, and the ids that
    would end it before min_tokens. Empty rather than leaving a request with nothing to choose from.
    """
    banned: set[int] = set()
    if request.bad_words_ids:
        longest = max(len(word) for word in request.bad_words_ids)
        first = max(request.num_prompt_tokens, request.num_tokens - longest)
        tail = request.token_ids[first:]
        for *start, last in request.bad_words_ids:
            if not start or tail[-len(start) :] == start:
                banned.add(last)
    if request.num_output_tokens < request.params.min_tokens:
        banned.update(request.eos_token_ids)
        banned.update(request.params.stop_token_ids or ())
    allowed = request.params.allowed_token_ids
    if allowed is not None and banned.issuperset(allowed):
        return set()
    return banned


def _within_schema(logits: Tensor, given: Tensor, request: Request) -> Tensor:
    """fp32 [V] with what the request's schema does not allow at -inf. Where all that it allows is forbidden otherwise
    that does not count: `given` are the logits before."""
    follower, vocab_size = request.follower, logits.shape[0]
    new_ids = request.token_ids[request.num_prompt_tokens + follower.num_tokens :]
    allowed = sent(follower.allowed(new_ids, vocab_size), torch.bool, logits.device)
    kept = logits.masked_fill(~allowed, -math.inf)
    return kept if bool(kept.amax() > -math.inf) else given.masked_fill(~allowed, -math.inf)


def _apply_allowed(logits: Tensor, rows: list[tuple[int, Request]]) -> None:
    if not rows:
        return
    at = _index(logits, [(i, request.params.allowed_token_ids or ()) for i, request in rows])
    kept = logits[at]
    logits[_ids(logits, [i for i, _ in rows])] = -math.inf
    logits[at] = kept


def _apply_bans(logits: Tensor, rows: list[tuple[int, set[int]]]) -> None:
    if any(ids for _, ids in rows):
        logits[_index(logits, rows)] = -math.inf


def _apply_bias(logits: Tensor, rows: list[tuple[int, dict[int, float]]]) -> None:
    if rows:
        logits[_index(logits, rows)] += _floats(logits, [value for _, bias in rows for value in bias.values()])


def _apply_repetition(logits: Tensor, rows: list[tuple[int, Request]]) -> None:
    """Keskar et al., "CTRL", 2019: of tokens seen (prompt, output), positive logits / penalty, negative * penalty."""
    if not rows:
        return
    seen = [(i, set(request.token_ids)) for i, request in rows]
    penalties = [request.params.repetition_penalty for _, request in rows]
    penalty = _spread(_floats(logits, penalties), seen)
    at = _index(logits, seen)
    values = logits[at]
    logits[at] = torch.where(values > 0, values / penalty, values * penalty)


def _apply_counts(logits: Tensor, rows: list[tuple[int, Request]]) -> None:
    """OpenAI's API: logit -= count * frequency_penalty + (count > 0) * presence_penalty, over the output alone."""
    counts = [(i, Counter(request.output_token_ids)) for i, request in rows]
    if not any(counter for _, counter in counts):
        return
    frequency = _spread(_floats(logits, [request.params.frequency_penalty for _, request in rows]), counts)
    presence = _spread(_floats(logits, [request.params.presence_penalty for _, request in rows]), counts)
    count = _floats(logits, [n for _, counter in counts for n in counter.values()])
    logits[_index(logits, counts)] -= count * frequency + presence


def filter_logits(logits: Tensor, requests: Sequence[Request]) -> None:
    """Temperature, min-p, top-k, top-p of rows that are sampled at random: fp32 [R, V], changed in place.

    What is filtered out becomes -inf. Logits equal to the smallest kept one are kept as well, so the result does not
    depend on how a sort orders equals.
    """
    temperatures = [request.params.temperature for request in requests]
    if any(temperature != 1 for temperature in temperatures):
        logits /= _floats(logits, temperatures)[:, None]
    if any(request.params.min_p > 0 for request in requests):
        # p >= min_p * max(p)  <=>  logit >= max(logit) + log(min_p)
        log_min_p = [math.log(p) if (p := request.params.min_p) > 0 else -math.inf for request in requests]
        lowest = logits.amax(dim=-1) + _floats(logits, log_min_p)
        logits.masked_fill_(logits < lowest[:, None], -math.inf)
    rows = [i for i, request in enumerate(requests) if request.params.top_k > 0 or request.params.top_p < 1]
    if rows:
        lowest = logits.new_full((len(requests),), -math.inf)
        at = _ids(logits, rows)
        lowest[at] = _smallest_kept(logits[at], [requests[i] for i in rows])
        logits.masked_fill_(logits < lowest[:, None], -math.inf)


def _smallest_kept(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Smallest logit that top-k then top-p keep: [R], for fp32 [R, V].

    top-p keeps the likeliest tokens until their probability (among the k likeliest) reaches p: a token stays when the
    probability before it is below p, so at least one does.
    """
    vocab_size = logits.shape[1]
    top_k = [min(request.params.top_k or vocab_size, vocab_size) for request in requests]
    # Without top-p (p = 1) rounding must not drop the tail, so the bound is out of reach.
    top_p = _floats(logits, [request.params.top_p if request.params.top_p < 1 else 2.0 for request in requests])
    width = max(k if k < vocab_size else min(_FIRST_WIDTH, vocab_size) for k in top_k)
    k = _ids(logits, top_k)
    largest = logits.topk(width, dim=-1).values
    kept = _num_kept(logits, largest, k, top_p)
    if width < max(top_k) and bool(((kept == width) & (k > width)).any()):
        largest = logits.sort(dim=-1, descending=True).values
        kept = _num_kept(logits, largest, k, top_p)
    return largest.gather(1, kept[:, None] - 1).squeeze(1)


def _logsumexp(x: Tensor) -> Tensor:
    """log Σ exp over the last axis of fp32 [R, W]: a row's result does not depend on how many there are.

    (torch's own does with several threads and more than 32,768 columns; its log_softmax does not.)
    """
    return x.amax(dim=-1) - x.log_softmax(dim=-1).amax(dim=-1)


def _num_kept(logits: Tensor, largest: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """How many of the `largest` logits (fp32 [R, W], descending) stay, at least 1: int64 [R]."""
    within = torch.arange(largest.shape[1], device=largest.device) < top_k[:, None]
    total = torch.where(
        top_k < logits.shape[1],
        _logsumexp(largest.masked_fill(~within, -math.inf)),
        _logsumexp(logits),
    )
    probs = (largest - total[:, None]).exp()
    before = probs.cumsum(dim=-1) - probs
    return (within & (before < top_p[:, None])).sum(dim=-1).clamp(min=1)


def _index(logits: Tensor, rows: Sequence[tuple[int, Iterable[int]]]) -> tuple[Tensor, Tensor]:
    """Index of the elements (row, id) of all rows: two int64 tensors."""
    ids: list[int] = []
    row_of: list[int] = []
    for row, row_ids in rows:
        before = len(ids)
        ids.extend(row_ids)
        row_of.extend([row] * (len(ids) - before))
    return _ids(logits, row_of), _ids(logits, ids)


def _spread(values: Tensor, rows: Sequence[tuple[int, set[int] | Counter[int]]]) -> Tensor:
    """One value per row -> one per element of `_index(rows)`."""
    repeats = [len(ids) for _, ids in rows]
    return values.repeat_interleave(_ids(values, repeats), output_size=sum(repeats))


def _ids(like: Tensor, values: list[int]) -> Tensor:
    return sent(values, torch.int64, like.device)


def _floats(like: Tensor, values: Sequence[float]) -> Tensor:
    return sent(values, like.dtype, like.device)
