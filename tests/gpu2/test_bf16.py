"""The engine on two GPUs in bf16, at published widths: as right as transformers in bf16, with every kind of kernel."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import greedy
from bf16_answers import Figures, Judge, published
from checkpoints import GPU_CONFIGS
from gloo_groups import Groups
from nan_answers import SpoiltGroups, assert_nan_changes_nothing
from pairwise import Cell, pairwise_cover

MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {},
    "deepseek-v3": {"n_routed_experts": 32, "first_k_dense_replace": 1},  # four in each group; all of it in fp32 fits
    "qwen3-30b-a3b": {},
}
FEW: dict[str, Any] = {"num_hidden_layers": 3, "vocab_size": 8192}
LENGTHS = (1, 2, 7, 17, 33, 64, 90, 120) * 2
NUM_TOKENS = [24 + i for i in range(len(LENGTHS))]
"""Requests end one after the other: steps shrink within a graph and from graph to graph."""
MAX_SEQS = len(LENGTHS) // 2
COMMON: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": MAX_SEQS,
    "max_num_batched_tokens": 512,
    "cudagraph_capture_sizes": f"2,4,{MAX_SEQS}",
    "kv_cache_memory_bytes": 128 << 20,  # the references live on one of the GPUs
    "enable_prefix_caching": False,
    "step_timeout": 60.0,  # kernels are compiled when they are first used
}
DIMENSIONS = {
    "attention_backend": ("sdpa", "flashinfer"),
    "moe_backend": ("grouped_mm", "triton_grouped", "deep_gemm"),
    "all2all_backend": ("torch", "allgather_reducescatter"),
    "enforce_eager": (True, False),
}


def is_allowed(cell: Cell) -> bool:
    """Graphs only where every part can be captured."""
    captures = cell["attention_backend"] == "flashinfer" and cell["all2all_backend"] == "allgather_reducescatter"
    return captures or cell["enforce_eager"]


CELLS = pairwise_cover(DIMENSIONS, is_allowed)


def name_of(cell: Cell) -> str:
    kernels = (cell["attention_backend"], cell["moe_backend"], cell["all2all_backend"])
    return "-".join((*kernels, "eager" if cell["enforce_eager"] else "graphs"))


@pytest.fixture(scope="module", params=MODELS)
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    path = tmp_path_factory.mktemp(request.param)
    print(f"\n{request.param}\n{'':50} {Figures.header()}")
    yield Judge(published(request.param, **FEW, **MODELS[request.param]), path, "cuda", num_texts=48)
    shutil.rmtree(path)
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_as_right_as_bf16_can_be(groups: Groups, judge: Judge, cell: Cell) -> None:
    """Once without log-probabilities, with steps scheduled ahead; once with them."""
    asked, ranks = judge.prompts(LENGTHS), [i % 2 for i in range(len(LENGTHS))]
    results = []
    with groups.llm(judge.path, 2, **COMMON, **cell) as llm:
        for rank in llm.ranks:
            assert rank["attention_backend"] == cell["attention_backend"]
            assert rank["moe_backend"] == cell["moe_backend"], "another stands in for it"
        for logprobs in (None, 20):
            params = [greedy(count, logprobs=logprobs) for count in NUM_TOKENS]
            results += llm.generate(asked, params, use_tqdm=False, data_parallel_rank=ranks)
            for rank in llm.stats(reset=True):
                assert (rank["graphs"].get("graph", 0) >= max(NUM_TOKENS) / 2) is not cell["enforce_eager"]
    found = judge.figures(results)
    print(f"\n{name_of(cell):50} {found}")
    assert found.decisive, "not a token that must be right"
    assert found.faults() == []


@pytest.mark.parametrize(
    ("model", "experts"), [("v2-heads", "grouped_mm"), ("v3-heads", "triton_grouped"), ("qwen3-heads", "deep_gemm")]
)
def test_nan_in_unset_memory_and_padding(
    groups: Groups, spoilt: SpoiltGroups, model: str, experts: str, tmp_path: Path
) -> None:
    """Every graph has padding rows on each rank, and all of them on one without work."""
    from transformers import AutoConfig

    values = dict(GPU_CONFIGS[model])
    small = Judge(AutoConfig.for_model(values.pop("model_type"), **values), tmp_path, "cuda")
    options = COMMON | {"cudagraph_capture_sizes": f"{MAX_SEQS}", "moe_backend": experts}
    for rank in assert_nan_changes_nothing(small, groups, spoilt, attention_backend="flashinfer", **options):
        assert rank["graphs"].get("graph", 0) > 30
