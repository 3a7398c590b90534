"""Random requests for benchmarks that count steps. Knows only the offline front door."""

from __future__ import annotations

import random

from hocket.config.engine import EngineConfig
from hocket.errors import ConfigError
from hocket.llm import LLM
from hocket.request import SamplingParams


def check_fits(config: EngineConfig, field: str, prompt_len: int, output_len: int) -> None:
    """Raise ConfigError, naming the option `field`, where prompts of so many tokens and their output are more than a
    request may have: said before anything starts."""
    longest = config.scheduler.max_model_len
    if prompt_len + output_len > longest:
        allowed = f"at most {max(longest - output_len, 0)} (max_model_len {longest})"
        raise ConfigError(field, prompt_len, allowed, where=f"with {output_len} tokens of output")


def generate_random(llm: LLM, *, requests_per_rank: int, prompt_len: int, max_tokens: int, seed: int) -> None:
    """Greedily generate exactly `max_tokens` tokens for so many prompts of random ids, dealt to the ranks in turn.

    Prompts are drawn so that with one seed the shorter ones, and fewer, begin the longer ones.
    """
    num_ranks = llm.config.parallel.data_parallel_size
    total, ids = requests_per_rank * num_ranks, range(llm.config.model.vocab_size)
    draws = [random.Random(f"{seed}/{i}").choices(ids, k=prompt_len) for i in range(total)]
    prompts = [{"prompt_token_ids": token_ids} for token_ids in draws]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False, data_parallel_rank=[i % num_ranks for i in range(total)])
