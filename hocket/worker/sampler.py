"""From logits to tokens and their log-probabilities. Knows nothing of models, ranks or text.

Shapes: N rows of the batch, R rows sampled at random, P prompt positions, V vocabulary, K largest log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hocket.errors import HocketError
from hocket.host import sent
from hocket.outputs import TokenLogprobs
from hocket.request import Request
from hocket.worker.logits import filter_logits, is_processed, process_logits
from hocket.worker.noise import exponential_noise, stream_key

_NOISE_ELEMENTS = 1 << 22
"""Most elements of noise made at once: bounds its memory to about 100 MB."""
_LOGPROB_ROWS = 64
"""Most rows whose log-probabilities exist at once: about 100 MB with a vocabulary of 150 thousand."""


@dataclass(frozen=True)
class SampledTokens:
    """One token per row, and its log-probabilities where the request asks for them."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Samples one token per row. Stateless: a token depends on the row's logits, parameters, seed and length alone."""

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> SampledTokens:
        """`launch` and `finish` in one, where all tokens before are known."""
        ids = self.launch(logits, requests, [request.num_output_tokens for request in requests])
        return self.finish(logits, ids.tolist(), requests)

    def launch(self, logits: Tensor, requests: Sequence[Request], num_output_tokens: Sequence[int]) -> Tensor:
        """Sample from logits fp32 [N, V] (left unchanged), row i for requests[i]: ids int64 [N] on the same device, -1
        where a row's logits are not finite (NaN, +inf, or all that its request allows are -inf).

        num_output_tokens: of each request before this token; it may be more than the request itself knows by now,
        except where `needs_history`.
        """
        if not requests:
            return logits.new_empty(0, dtype=torch.int64)
        random_rows = [i for i, request in enumerate(requests) if not request.params.is_greedy]
        processed = process_logits(logits, requests)
        ids, finite = greedy(logits)
        if processed is not logits:
            ids, still = greedy(processed)
            finite &= still
        if random_rows:
            ids = _draw_into(ids, processed, random_rows, requests, num_output_tokens)
        return torch.where(finite, ids, -1)

    def finish(self, logits: Tensor, token_ids: list[int], requests: Sequence[Request]) -> SampledTokens:
        """What `launch` sampled from `logits`, with log-probabilities: those of the model, before bias, penalties and
        temperature.

        Raises:
            HocketError: a row's logits were not finite; names it.
        """
        _check_finite(token_ids, requests)
        return SampledTokens(token_ids, _logprobs_of(logits, token_ids, requests))


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits fp32 [N, V] → ids of the largest, of equal ones the first: int64 [N]; whether it is finite: bool [N]."""
    largest, ids = logits.max(dim=-1)  # NaN propagates
    return ids, largest.isfinite()


def needs_history(request: Request) -> bool:
    """Whether a token of this request can be sampled only when all before it are known on the host, or its logits are
    needed there afterwards."""
    params = request.params
    return is_processed(request) or params.logprobs is not None or params.prompt_logprobs is not None


def _draw_into(
    ids: Tensor, logits: Tensor, rows: list[int], requests: Sequence[Request], num_output_tokens: Sequence[int]
) -> Tensor:
    """`ids` with those of `rows` replaced by draws."""
    drawing, lengths = [requests[i] for i in rows], [num_output_tokens[i] for i in rows]
    if len(rows) == len(requests):
        return draw(logits.clone(), drawing, lengths)
    at = sent(rows, torch.int64, logits.device)
    return ids.index_copy(0, at, draw(logits[at], drawing, lengths))


def draw(logits: Tensor, requests: Sequence[Request], num_output_tokens: Sequence[int]) -> Tensor:
    """Draw from fp32 [R, V] (overwritten) by the requests' temperature, min_p, top_k, top_p and seed: int64 [R].

    An exponential race: with E exponentially distributed, argmin E / p is distributed as p, and so is
    argmax(logit - log E). E is a function of (seed, number of output tokens, token id).
    """
    filter_logits(logits, requests)
    num_ids = logits.shape[1]
    keys = sent(
        [stream_key(request.seed, length) for request, length in zip(requests, num_output_tokens, strict=True)],
        torch.int64,
        logits.device,
    )
    step = max(1, _NOISE_ELEMENTS // num_ids)
    for begin in range(0, len(requests), step):
        logits[begin : begin + step] -= exponential_noise(keys[begin : begin + step], num_ids).log_()
    return logits.argmax(dim=-1)


def _check_finite(token_ids: list[int], requests: Sequence[Request]) -> None:
    if -1 not in token_ids:
        return
    names = [request.request_id for request, token in zip(requests, token_ids, strict=True) if token == -1]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise HocketError(f"the logits of request {names[0]!r}{more} are not finite (NaN or infinite): nothing to sample")


def _logprobs_of(logits: Tensor, token_ids: list[int], requests: Sequence[Request]) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(requests)
    rows = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    if not rows:
        return result
    chosen = logits if len(rows) == len(requests) else logits[torch.tensor(rows, device=logits.device)]
    wanted = [requests[i].params.logprobs or 0 for i in rows]
    for i, logprobs in zip(rows, gather_logprobs(chosen, [token_ids[i] for i in rows], wanted), strict=True):
        result[i] = logprobs
    return result


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], wanted: int) -> list[TokenLogprobs]:
    """Log-probabilities of prompt tokens: row i of logits fp32 [P, V] predicts token_ids[i].

    wanted: how many of the largest to add to each; -1: the whole vocabulary.
    """
    return gather_logprobs(logits, token_ids, [wanted] * len(token_ids))


def gather_logprobs(logits: Tensor, token_ids: Sequence[int], wanted: Sequence[int]) -> list[TokenLogprobs]:
    """Of each row of fp32 [N, V]: log-probability and rank of token_ids[i], then the wanted[i] (-1: V) largest.

    Equal ones are ordered by id, whatever else is in the batch.
    """
    result: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _LOGPROB_ROWS):
        part = slice(start, start + _LOGPROB_ROWS)
        result += _gather_part(logits[part], token_ids[part], wanted[part])
    return result


def _gather_part(logits: Tensor, token_ids: Sequence[int], wanted: Sequence[int]) -> list[TokenLogprobs]:
    """`gather_logprobs` of a few rows."""
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    vocab_size = logprobs.shape[1]
    counts = [vocab_size if count < 0 else min(count, vocab_size) for count in wanted]
    ids = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    values = logprobs.gather(1, ids)
    # As bytes: a sum of booleans takes several times as long on a CPU.
    ranks = (1 + (logprobs > values).view(torch.uint8).sum(dim=-1, dtype=torch.int32)).tolist()
    most = max((count for count in counts if count < vocab_size), default=0)
    if most:
        top_ids = _largest_first(logprobs, most)
        values = torch.cat((values, logprobs.gather(1, top_ids)), dim=1)
        ids = torch.cat((ids, top_ids), dim=1)
    rows = list(zip(ids.tolist(), values.tolist(), strict=True))
    result = []
    for i, ((row_ids, row_values), count) in enumerate(zip(rows, counts, strict=True)):
        if count == vocab_size:  # one row at a time: as Python lists they take most of the memory
            ordered = logprobs[i].sort(descending=True, stable=True)
            row_ids, row_values = row_ids[:1] + ordered.indices.tolist(), row_values[:1] + ordered.values.tolist()
        result.append(TokenLogprobs(row_ids[: count + 1], row_values[: count + 1], ranks[i]))
    return result


def _largest_first(values: Tensor, k: int) -> Tensor:
    """Ids of the k largest of each row of fp32 [N, V], k < V, descending, equal ones by id: int64 [N, k].

    topk orders equals as it likes, and chooses among those at the border as it likes.
    """
    top, ids = values.topk(k + 1, dim=-1)
    equal = top[:, 1:] == top[:, :-1]
    if not bool(equal.any()):
        return ids[:, :k]
    for row in equal[:, -1].nonzero().flatten().tolist():
        lowest = top[row, k]
        num_above = int((top[row] > lowest).sum())
        ids[row, num_above:k] = (values[row] == lowest).nonzero().flatten()[: k - num_above]
    by_id = ids[:, :k].sort(dim=-1).values
    order = values.gather(1, by_id).sort(dim=-1, descending=True, stable=True).indices
    return by_id.gather(1, order)
