"""Situations that have broken systems of this kind, on one rank in this process. Each test is named by its row."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import more_checkpoints
import paged
import pytest
import torch
from answers import assert_right, expert_load, greedy, ids_of, prompts
from checkpoints import hf_reference
from in_process import engine_of, group_of, in_process_llm
from more_checkpoints import Tensors, edited, fp8_pair
from overlapped import OFF_FORCED, Mode

from hocket.config.backends import CPU_EXPERTS
from hocket.config.engine import OverlapConfig
from hocket.config.model import ModelConfig
from hocket.errors import BackendUnavailable, CapacityError, CheckpointError, ConfigError, HocketError, StepDesync
from hocket.models.loader import load_weights
from hocket.moe.base import TokenLayout
from hocket.moe.experts.registry import experts_class, suitable_class
from hocket.moe.layer import MoELayer
from hocket.moe.placement import ExpertPlacement
from hocket.moe.transport.local import LocalTransport
from hocket.overlap import vote
from hocket.overlap.vote import NUM_ROWS, Row
from hocket.request import EngineRequest, Request, SamplingParams
from hocket.scheduler.batch import Batch, ScheduledRequest
from hocket.trace.spans import Stage
from hocket.ubatch.transfer import Running

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoints(checkpoints: Path) -> Checkpoints:
    return more_checkpoints.maker(checkpoints)


# -- correctness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["v3", "qwen3"])
def test_r009_padding_full_of_nan(checkpoints: Checkpoints, model: str) -> None:
    """One real request in a bucket of 8 rows: inputs of padding, unwritten cache and its blocks hold NaN."""
    path = checkpoints(model)
    prompt = prompts(path, (5,), num_tokens=3)[0]
    run = paged.PagedRun(paged.load(path))
    run.spoil_padding()
    new, found = prompt, []
    for num_padding in (3, 7, 7):
        logits = run.step([("a", new)], num_padding=num_padding)["a"]
        assert logits.isfinite().all()
        new = [int(logits[-1].argmax())]
        found += new
    assert found == hf_reference(path).greedy(prompt, 3)


@pytest.mark.parametrize("backend", CPU_EXPERTS)
def test_r012_ids_without_expert_and_ids_out_of_range(backend: str) -> None:
    """Rows of −1 are dropped, other ids out of range raise, nothing wraps around."""
    placement = ExpertPlacement(4, 1)
    transport = LocalTransport(placement)
    experts = experts_class(backend)(4, 16, 16, dtype=torch.float32)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    x, weights = torch.randn(3, 16), torch.ones(3, 2)
    layout = TokenLayout.of(3, 3, 3, paged.CPU)
    x[1] = torch.nan
    dispatch = transport.prepare(x, torch.tensor([[0, -1], [-1, -1], [3, 1]]), weights, layout)
    sent = Running(dispatch, Stage.DISPATCH).finish(Stage.EXPERTS)
    combine = transport.finalize(experts(sent.x, sent.ids, sent.weights), sent.handle)
    out = Running(combine, Stage.COMBINE).finish(Stage.QKV)
    assert out.isfinite().all()
    assert not out[1].any()
    assert out[0].any()
    for wrong in (4, -2, 1 << 40):
        with pytest.raises(HocketError, match=r"must be -1 or in \[0, 4\)"):
            transport.prepare(x, torch.tensor([[0, wrong], [1, 2], [3, 1]]), weights, layout)
        with pytest.raises(HocketError, match=r"must be -1 or in \[0, 4\)"):
            experts(x, torch.tensor([[0, wrong], [1, 2], [3, 1]]), weights)


@pytest.mark.parametrize("backend", CPU_EXPERTS)
@pytest.mark.parametrize("num_local", [0, 3])
def test_r013_all_experts_elsewhere(backend: str, num_local: int) -> None:
    """A rank none of whose experts is wanted reads nothing and gives zeros, whatever its rows hold."""
    experts = experts_class(backend)(num_local, 16, 16, dtype=torch.float32)
    for parameter in experts.parameters():
        parameter.fill_(torch.nan)
    out = experts(torch.full((5, 16), torch.nan), torch.full((5, 4), -1), torch.full((5, 4), torch.nan))
    assert out.shape == (5, 16)
    assert not out.any()


@OFF_FORCED
def test_r016_alone_and_together(checkpoints: Checkpoints, overlap: Mode) -> None:
    path = checkpoints("v2")
    given = prompts(path, (1, 9, 16, 33, 70), num_tokens=10)
    with in_process_llm(path, enable_prefix_caching=False) as llm:
        together = llm.generate(given, greedy(10, logprobs=2))
        alone = [llm.generate([prompt], greedy(10))[0] for prompt in given]
        overlap.check(llm.stats(), least=60)
    assert_right(path, together)
    assert ids_of(alone) == ids_of(together)


# -- ranks decide alike ---------------------------------------------------------------------------------------------


def column_of(num_tokens: int, *, step: int = 7, digest: int = 9) -> list[int]:
    """A rank's facts about a step that computes one prompt of this length (0: nothing)."""
    rows: tuple[ScheduledRequest, ...] = ()
    if num_tokens:
        request = Request(EngineRequest("r", [3] * num_tokens, SamplingParams()))
        rows = (
            ScheduledRequest(
                request=request, start=0, num_tokens=num_tokens, needs_sample=True, is_prefill=True, block_ids=[0]
            ),
        )
    batch = Batch(rows, num_tokens, num_tokens)
    return vote.facts(batch, step=step, digest=digest, num_unfinished=len(rows))


@pytest.mark.parametrize("sizes", [(33, 0), (0, 33), (7, 1), (1, 17), (1, 1), (0, 0)])
def test_r025_r027_r040_r042_one_plan_from_shared_facts(sizes: tuple[int, int]) -> None:
    """The plan is a function of the table alone, and nothing a rank keeps to itself gets into it."""
    table = [column_of(size) for size in sizes]
    plans = []
    for rank in range(2):
        received = [list(column) for column in table]
        received[rank][Row.ARRIVAL_US] = rank + 1  # the clock of figures, the one row that may not matter
        plans.append(vote.decide(received, OverlapConfig()))
    assert plans[0] == plans[1]
    assert plans[0].num_tokens == sizes
    assert plans[0].num_tokens_max == max(sizes)
    assert plans[0].is_idle == (sizes == (0, 0))
    assert all(len(column) == NUM_ROWS for column in table)


def test_r040_ranks_at_different_steps_or_settings_raise() -> None:
    with pytest.raises(StepDesync, match="rank 2 has step 8 where the others have 7"):
        vote.decide([column_of(4), column_of(4), column_of(4, step=8)], OverlapConfig())
    with pytest.raises(StepDesync, match="rank 0 has configuration digest 1 where the others have 9"):
        vote.decide([column_of(4, digest=1), column_of(4), column_of(0)], OverlapConfig())


# -- load, limits ---------------------------------------------------------------------------------------------------


@OFF_FORCED
@pytest.mark.parametrize("model", ["qwen3", "v3"])
def test_r073_expert_load_is_the_routers_choice_exactly(checkpoints: Checkpoints, model: str, overlap: Mode) -> None:
    """Counts per layer and expert equal those of transformers' routers over the same tokens."""
    path = checkpoints(model)
    given = prompts(path, (5, 40, 17), num_tokens=6)
    with in_process_llm(path, enable_prefix_caching=False, long_prefill_token_threshold=16) as llm:
        layers = [m for m in engine_of(llm).runner.model.modules() if isinstance(m, MoELayer)]
        for layer in layers:
            layer.count_expert_load()
        results = llm.generate(given, greedy(6))
        assert_right(path, results)
        overlap.check(llm.stats(), least=6)
    expected = expert_load(path, results)
    assert [layer.expert_load.tolist() for layer in layers if layer.expert_load is not None] == [
        total.tolist() for total in expected
    ]


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({"max_num_batched_tokens": 16, "max_num_seqs": 32}, ("16", "32")),
        ({"max_model_len": 1024}, ("1024", "512")),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 300}, ("300", "512")),
        ({"kv_cache_memory_bytes": 100_000}, ("100,000 bytes", "655,360 bytes")),
    ],
)
def test_r078_limits_are_refused_with_both_numbers(
    checkpoints: Checkpoints, options: dict[str, Any], numbers: tuple[str, str]
) -> None:
    with pytest.raises((ConfigError, CapacityError)) as caught, in_process_llm(checkpoints("qwen3"), **options):
        pass
    assert all(number in str(caught.value) for number in numbers), caught.value
    assert "\n" not in str(caught.value)


def test_r078_a_prompt_over_the_limit_is_refused_and_starts_nothing(checkpoints: Checkpoints) -> None:
    with in_process_llm(checkpoints("qwen3"), max_model_len=64) as llm:
        with pytest.raises(CapacityError, match=r"64 tokens.* at most 63 fit \(max_model_len 64\)"):
            llm.generate([[5, 6], [7] * 64], greedy(2))
        assert not engine_of(llm).has_work
        assert len(llm.generate([[7] * 63], greedy(5))[0].outputs[0].token_ids) == 1


@OFF_FORCED
def test_r121_an_abort_frees_its_blocks_at_once(checkpoints: Checkpoints, overlap: Mode) -> None:
    path = checkpoints("qwen3")
    given = prompts(path, (20, 21, 22, 23), num_tokens=4)
    with in_process_llm(path, block_size=4, enable_prefix_caching=False) as llm:
        llm.client.add_many([(f"{i}", prompt, greedy(40, logprobs=1), None) for i, prompt in enumerate(given)])
        done = {}
        while group_of(llm).num_steps < 8:
            llm.client.poll(1.0)
        before = engine_of(llm).scheduler.counters()
        num_blocks = engine_of(llm).runner.num_blocks
        llm.client.abort(["1"])
        for _ in range(2):
            llm.client.poll(1.0)
        after = engine_of(llm).scheduler.counters()
        assert (before.num_running, after.num_running) == (4, 3)
        # 21 + 8 tokens gave back 7 or 8 blocks; the others took at most one each in two steps.
        assert round((before.kv_usage - after.kv_usage) * num_blocks) >= 7 - 3
        while llm.client.has_unfinished:
            done |= {result.request_id: result for result in llm.client.poll(1.0) if result.finished}
        assert engine_of(llm).scheduler.counters().kv_usage == 0.0
        overlap.check(llm.stats(), least=40)
    assert sorted(done) == ["0", "2", "3"]
    assert_right(path, list(done.values()))


def test_r100_a_reference_is_always_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where a fast backend cannot run, the reason and what runs instead are said."""
    assert suitable_class("grouped_mm", 30, 16, torch.bfloat16).name == "reference"
    assert "grouped_mm replaced by reference" in caplog.text
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    with pytest.raises(BackendUnavailable, match=r"torch .* has no .*available here: reference"):
        experts_class("grouped_mm")
    assert experts_class("reference").name == "reference"


# -- checkpoints ----------------------------------------------------------------------------------------------------


def test_r099_fp8_blocks_are_expanded_with_a_warning(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fp8, exact = fp8_pair(checkpoints("v3"), tmp_path)
    with in_process_llm(fp8) as llm:
        results = llm.generate(prompts(exact, (3, 30), num_tokens=6), greedy(6, logprobs=4))
    assert_right(exact, results)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "fp8 tensors are expanded to torch.float32" in warnings[0].getMessage()


def renamed(prefix: str, head: str) -> Callable[[Tensors], Tensors]:
    """The same tensors, the language model's below `prefix`."""

    def rename(tensors: Tensors) -> Tensors:
        return {
            head if name == "lm_head.weight" else prefix + name.removeprefix("model."): value
            for name, value in tensors.items()
        }

    return rename


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("", "lm_head.weight"),
    ],
)
def test_r129_prefixes(checkpoints: Checkpoints, tmp_path: Path, prefix: str, head: str) -> None:
    path = checkpoints("qwen3")
    nested = edited(path, tmp_path / "nested", renamed(prefix, head))
    with in_process_llm(nested) as llm:
        assert_right(path, llm.generate(prompts(path, (12,), num_tokens=6), greedy(6, logprobs=2)))


def test_r129_a_misspelt_name_is_shown_with_the_nearest(checkpoints: Checkpoints, tmp_path: Path) -> None:
    def misspell(tensors: Tensors) -> None:
        tensors["model.layers.1.self_attn.out_proj.weight"] = tensors.pop("model.layers.1.self_attn.o_proj.weight")

    path = edited(checkpoints("qwen3"), tmp_path / "misspelt", misspell)
    with pytest.raises(CheckpointError, match=r"1 missing: \S*1\.self_attn\.o_proj.*nearest.*out_proj") as caught:
        load_weights(paged.load(checkpoints("qwen3")), path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layout", ["published", "fused"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3-no-norm"])
def test_r130_renormalised_or_not_in_both_layouts(checkpoints: Checkpoints, model: str, layout: str) -> None:
    """Logits over the whole vocabulary equal transformers'."""
    path = checkpoints(model, layout)
    assert ModelConfig.from_pretrained(path).moe.norm_topk_prob == (model == "qwen3")
    prompt = prompts(checkpoints(model), (23,), num_tokens=4)
    with in_process_llm(path) as llm:
        results = llm.generate(prompt, greedy(4, logprobs=-1))
    assert len((results[0].outputs[0].logprobs or [])[0]) == 512
    assert_right(checkpoints(model), results, tolerance=1e-5)
