"""The engine on GPUs in fp32: transformers' answers, on one GPU and two, with each transport; `tiny` as on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from answers import assert_right, greedy, ids_of, prompts
from gloo_groups import Groups

TRANSPORTS = ("torch", "allgather_reducescatter")
LENGTHS = (1, 2, 7, 33, 64, 120)
RANKS = [(1, {}), (2, {"enable_expert_parallel": False}), *((2, {"all2all_backend": name}) for name in TRANSPORTS)]


def fp32(**options: Any) -> dict[str, Any]:
    return {"device": "cuda", "dtype": "float32", "block_size": 4, "max_model_len": 256, **options}


@pytest.mark.parametrize("model", ["v2", "v2-groups", "v3", "qwen3"])
@pytest.mark.parametrize(("num_ranks", "options"), RANKS, ids=str)
@pytest.mark.parametrize("chunk", [0, 16])
def test_same_answers_as_transformers(
    groups: Groups, checkpoints: Callable[..., Path], model: str, num_ranks: int, options: dict[str, Any], chunk: int
) -> None:
    path = checkpoints(model)
    with groups.llm(path, num_ranks, **fp32(long_prefill_token_threshold=chunk, **options)) as llm:
        for _ in range(2):  # the second time from the prefix cache
            results = llm.generate(prompts(path, LENGTHS, num_tokens=12), greedy(12, logprobs=2), use_tqdm=False)
            assert_right(path, results)
        assert all(info["device"] == "cuda" for info in llm.ranks)


def test_tiny_says_what_it_says_on_a_cpu(groups: Groups) -> None:
    """With what "auto" chooses: flashinfer has no kernels for fp32, so that sdpa stands in."""
    given = ["In the beginning", "The lady was", "It is a truth universally acknowledged, that"]
    found = []
    for device in ("cpu", "cuda"):
        options = {"device": device, "dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": False}
        with groups.llm("tiny", 2, **options) as llm:
            assert {rank["attention_backend"] for rank in llm.ranks} == {"sdpa"}
            found.append(ids_of(llm.generate(given, greedy(48), use_tqdm=False)))
    assert found[0] == found[1]
