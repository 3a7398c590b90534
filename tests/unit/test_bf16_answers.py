"""The judge of bf16 answers, on small models of the published kinds: a right engine passes, faults fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from answers import greedy
from bf16_answers import Figures, Judge, small
from in_process import engine_of, in_process_llm
from model_faults import (
    ModelPlant,
    drop_shared_experts,
    drop_softmax_mscale,
    layer_of,
    moe_layers,
    reroute,
    swap_experts,
    swap_gate_and_up,
    swap_head_norms,
    swap_layer_norms,
)

from hocket.models.base import CausalLM

LENGTHS = (1, 2, 7, 17, 33, 64, 90, 120)
MODELS = ("deepseek-v2-lite", "deepseek-v3", "qwen3-30b-a3b")


@pytest.fixture(scope="module")
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    return Judge(small(request.param), tmp_path_factory.mktemp(request.param), "cpu")


def figures(judge: Judge, plant: ModelPlant | None = None, **options: Any) -> Figures:
    common: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 26}
    with in_process_llm(judge.path, **common, **options) as llm, torch.inference_mode():
        if plant is not None:
            plant(engine_of(llm).runner.model)
        found = judge.figures(llm.generate(judge.prompts(LENGTHS), greedy(24, logprobs=20), use_tqdm=False))
    print(f"\n{Figures.header()}\n{found} {found.faults()}")
    return found


@pytest.mark.parametrize("judge", MODELS, indirect=True)
@pytest.mark.parametrize("experts", ["grouped_mm", "reference"])
def test_a_right_engine(judge: Judge, experts: str) -> None:
    found = figures(judge, moe_backend=experts)
    assert found.faults() == []
    assert found.tokens == 24 * len(LENGTHS)
    assert found.decisive > found.tokens / 20, "hardly a token that must be right"
    assert found.mean > 0


def scale_experts(model: CausalLM) -> None:
    """All of them, as a wrong factor in a kernel does."""
    for moe in moe_layers(model):
        moe.experts.w2.mul_(1.2)


def lose_experts(model: CausalLM) -> None:
    """One in eight of every layer."""
    for moe in moe_layers(model):
        moe.experts.w2[::8] = 0


def scale_softmax(model: CausalLM) -> None:
    for index in range(len(model.layers)):
        attention: Any = layer_of(model, index).attention
        attention.scale *= 1.05


V2, V3, QWEN = MODELS
FAULTS: dict[str, tuple[tuple[str, ...], ModelPlant]] = {
    "experts × 1.2": (MODELS, scale_experts),
    "experts lost": (MODELS, lose_experts),
    "experts swapped": ((V2, QWEN), swap_experts),
    "gate and up swapped": ((V3,), swap_gate_and_up),
    "shared experts dropped": ((V3,), drop_shared_experts),
    "softmax scale × 1.05": (MODELS, scale_softmax),
    "YaRN's softmax scale dropped": ((V3,), drop_softmax_mscale),
    "layer norms swapped": ((V2,), swap_layer_norms),
    "head norms swapped": ((QWEN,), swap_head_norms),
    "group limit dropped": ((V3,), reroute(topk_groups=8)),
}
PLANTED = [(model, fault) for fault, (models, _) in FAULTS.items() for model in models]


@pytest.mark.parametrize(("judge", "fault"), PLANTED, indirect=["judge"])
def test_a_fault(judge: Judge, fault: str) -> None:
    assert figures(judge, FAULTS[fault][1]).faults()
