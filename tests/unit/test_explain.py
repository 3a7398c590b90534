"""`hocket explain`: its figures are those of the parts that would run, and it starts nothing."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hocket.bench.shapes import changed
from hocket.cli.main import main
from hocket.config.engine import EngineConfig
from hocket.config.options import Options
from hocket.config.resolve import resolve, resolve_and_say
from hocket.doctor.choice import choice
from hocket.doctor.show import console
from hocket.errors import ConfigError
from hocket.explain import describe as describing
from hocket.explain.describe import describe
from hocket.explain.memory import held_by_first_rank, memory
from hocket.explain.messages import messages
from hocket.explain.options import BECAME, NOT_KEPT, resolve_what_can_be, resolved_options
from hocket.explain.show import show
from hocket.moe.transport.rows import RowFormat

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"
V3, V3_FP8 = (str(SHAPES / name) for name in ("deepseek-v3", "deepseek-v3-fp8"))
WIDE = {"data_parallel_size": 2, "enable_expert_parallel": True}
DBO = {**WIDE, "enable_dbo": True}
GIB = 1 << 30


def described(free_bytes: int | None = 4 * GIB, **options: Any) -> dict[str, Any]:
    found, refusal = describe(Options.from_dict(options), free_bytes)
    assert refusal is None
    return found


def resolved(**options: Any) -> EngineConfig:
    return resolve(Options.from_dict({"device": "cpu", **options}), gpus=options.get("data_parallel_size", 1))


# -- overlap -----------------------------------------------------------------------------------------------------------


def test_thresholds() -> None:
    found = described(**DBO, dbo_decode_token_threshold=5, dbo_prefill_token_threshold=7, max_num_seqs=9)
    assert found["splits"]["decode"] == [
        {"tokens": [1, 4], "reason": "below_threshold"},
        {"tokens": [5, 9], "reason": "split"},
    ]
    assert found["splits"]["prefill"] == [
        {"tokens": [1, 6], "reason": "below_threshold"},
        {"tokens": [7, 2048], "reason": "split"},
    ]


def test_steps_are_voted_on() -> None:
    found = described(**DBO, dbo_decode_token_threshold=5, max_num_seqs=9)
    steps = {(one["phase"], one["what"], *one["tokens"]): one for one in found["steps"]}
    assert steps["decode", "all ranks alike", 9, 9]["ubatches"] == [4, 5]
    assert steps["decode", "all ranks alike", 4, 4]["reason"] == "below_threshold"
    assert steps["decode", "all ranks alike", 4, 4]["why"] == "4 < 5, the decode threshold"
    assert steps["decode", "one rank idle", 9, 0]["reason"] == "split"
    assert steps["decode", "one rank has 1", 9, 1]["reason"] == "below_threshold"
    assert steps["prefill", "prefix of the same step", 2048, 2048]["reason"] == "prefix_hazard"
    by_cost = described(**DBO, ubatch_cut="cost")["steps"]
    assert {one["reason"] for one in by_cost} >= {"split"}
    assert not any(one["ubatches"] for one in by_cost), "where a batch is cut is not known from its size"


def test_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "3")
    found = described(dbo_decode_token_threshold=7)
    assert found["num_ubatches"] == 3
    assert [run["reason"] for run in found["splits"]["decode"]] == ["split"]
    rows = {one["option"]: one for one in found["options"]}
    assert rows["ubatch_size"]["became"] == 3
    assert rows["ubatch_size"]["why"] == "HOCKET_FORCE_SPLIT is set"
    assert rows["dbo_decode_token_threshold"]["became"] is None, "it has no effect then"


def test_schedule_follows_the_transport() -> None:
    plain = described(**DBO)["schedules"]["prefill"]
    assert plain["lanes"][0] == {"comm": "D₀", "compute": ["A0₁", "A1₁"]}
    assert not any("recv" in launch for launch in plain["order"])
    blocking = described(**DBO, device="cuda", all2all_backend="torch")["schedules"]["prefill"]
    assert blocking["lanes"][:2] == [{"comm": "D₀", "compute": ["A0₁", "A1₁"]}, {"comm": "D₁", "compute": ["M₀"]}]
    assert blocking["order"].index("M₀") < blocking["order"].index("D₁ send")
    apart = described(**DBO, emulate_link_gb_per_s=1)["schedules"]["prefill"]
    assert apart["order"].index("D₀ recv") < apart["order"].index("D₁ send")
    assert len(described(**{**DBO, "enable_dbo": False, "ubatch_size": 3})["schedules"]["decode"]["lanes"]) == 6


def of_transport_alone(config: EngineConfig, backends: Any) -> list[str]:
    return ["torch"] if config.parallel.all2all_backend == "torch" else []


def test_on_gpus_decodes_replay_graphs_and_torch_hands_over_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hocket.config.resolve.num_gpus", lambda: 2)
    monkeypatch.setattr("hocket.explain.describe._uncapturable", of_transport_alone)  # as where FlashInfer is
    found = described(**DBO, max_num_seqs=64, max_cudagraph_capture_size=40)
    assert found["splits"]["decode"] == [
        {"tokens": [1, 31], "reason": "below_threshold"},
        {"tokens": [32, 64], "reason": "split"},
    ]
    assert found["graphs"]["split_sizes"] == [32, 40]
    decodes = [one for one in found["steps"] if (one["phase"], one["what"]) == ("decode", "all ranks alike")]
    assert {one["tokens"][0]: (one["graph_tokens"], one["ubatches"]) for one in decodes} == {
        1: (1, []),
        31: (32, []),
        32: (32, [16, 16]),
        40: (40, [20, 20]),
        41: (0, [20, 21]),
        64: (0, [32, 32]),
    }
    by_cost = described(**DBO, max_num_seqs=64, max_cudagraph_capture_size=40, ubatch_cut="cost")["steps"]
    assert {tuple(one["ubatches"]) for one in by_cost if one["graph_tokens"] == 40 and one["reason"] == "split"} == {
        (20, 20)
    }
    whole = described(**DBO, max_num_seqs=64, max_cudagraph_capture_size=40, split_graphs=False)
    assert whole["splits"]["decode"] == [
        {"tokens": [1, 31], "reason": "below_threshold"},
        {"tokens": [32, 40], "reason": "no_split_graph"},
        {"tokens": [41, 64], "reason": "split"},
    ]
    assert whole["graphs"]["split_sizes"] == []
    few = described(**DBO, max_num_seqs=128, cudagraph_capture_sizes="40,128")
    assert few["splits"]["decode"] == [
        {"tokens": [1, 31], "reason": "below_threshold"},
        {"tokens": [32, 40], "reason": "split"},
        {"tokens": [41, 64], "reason": "no_split_graph"},
        {"tokens": [65, 128], "reason": "split"},
    ]
    eager = described(**DBO, all2all_backend="torch", max_num_seqs=64)
    assert [run["reason"] for run in eager["splits"]["decode"]] == ["below_threshold", "split"]
    assert eager["schedules"]["prefill"]["name"] != found["schedules"]["prefill"]["name"]


def test_placement() -> None:
    assert described(data_parallel_size=3, enable_expert_parallel=True)["experts"]["by_rank"] == [6, 5, 5]
    assert described(data_parallel_size=3)["experts"]["by_rank"] == [16]


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_messages_of_fixed_shapes_are_rows_to_all_others(device: str) -> None:
    """On a CPU sums come back in numbered rows, on a GPU as they are."""
    config = resolved(model=V3, data_parallel_size=8, enable_expert_parallel=True, device=device, dtype="bfloat16")
    (found,) = (one for one in messages(config) if one["name"] == "allgather_reducescatter")
    hidden, top_k = config.model.hidden_size, config.model.moe.top_k
    row = RowFormat(hidden, top_k, torch.bfloat16).row_bytes
    back = RowFormat(hidden, 0, torch.bfloat16).row_bytes if device == "cpu" else hidden * 2
    assert (found["dispatch_bytes"], found["combine_bytes"]) == (7 * row, 7 * back)
    assert found["received_bytes"] == 8 * row


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_room_for_uneven_messages(device: str) -> None:
    """A CPU is told how many rows come, as many as are sent; on a GPU there is room for all of all ranks."""
    config = resolved(model=V3, data_parallel_size=8, enable_expert_parallel=True, device=device, dtype="bfloat16")
    (found,) = (one for one in messages(config) if one["name"] == "torch")
    row = RowFormat(config.model.hidden_size, config.model.moe.top_k, torch.bfloat16).row_bytes
    if device == "cuda":
        assert found["received_bytes"] == 8 * row
    else:
        assert found["dispatch_bytes"] < found["received_bytes"] <= found["dispatch_bytes"] + row


def test_uneven_messages_go_to_the_ranks_of_the_experts() -> None:
    """Qwen3 chooses freely: a token misses a rank of E/n experts with (1 − 1/n)^K or a little less. DeepSeek-V3 chooses
    from 4 of 8 groups, which are 8 ranks' experts: it reaches at most 4 of them."""
    free = resolved(model=str(SHAPES / "qwen3-30b-a3b"), data_parallel_size=8, enable_expert_parallel=True)
    limited = resolved(model=V3, data_parallel_size=8, enable_expert_parallel=True, dtype="bfloat16")
    copies = []
    for config in (free, limited):
        (found,) = (one for one in messages(config) if one["name"] == "torch")
        dtype = getattr(torch, config.dtype)
        row = RowFormat(config.model.hidden_size, config.model.moe.top_k, dtype).row_bytes
        copies.append(found["dispatch_bytes"] / row)
    assert copies[0] == pytest.approx(7 * (1 - (7 / 8) ** 8), rel=0.06)
    assert 2.5 < copies[1] < 3.6


def test_one_rank_moves_nothing() -> None:
    assert messages(resolved()) == []
    found = described()
    assert "logits" in found["memory"]["buffers"][0]["what"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_is_what_doctor_finds(ranks: int) -> None:
    config = resolved(data_parallel_size=ranks, enable_expert_parallel=ranks > 1)
    held = held_by_first_rank(config)
    found = memory(config, held, None, 0.0)
    told = choice(config, None)
    for name in ("weights_bytes", "experts"):
        assert found[name] == told[name]
    given = memory(config, held, found["weights_bytes"] * ranks + 100 * ranks * found["kv_bytes_per_block"], 0.0)
    assert given["cache_blocks"] == 90, "the share of gpu_memory_utilization"
    assert given["cache_bytes"] == 90 * given["kv_bytes_per_block"]
    assert given["kv_bytes_per_block"] == config.cache.block_size * given["kv_bytes_per_token"]
    assert "weights need" in memory(config, held, found["weights_bytes"] * ranks, 0.0)["problem"]


def test_fp8_is_less_where_it_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(model=V3_FP8, load_format="dummy", device="cuda", max_model_len=4096, max_num_seqs=9999)
    with changed(options, None, 4) as (few_layers, _):
        config = resolve(replace(few_layers, max_num_batched_tokens=9999), gpus=1)
        held = held_by_first_rank(config)
        found = memory(config, held, 60 * GIB, 0.0)
        assert 0.5 < found["weights_fp8_bytes"] / found["weights_bytes"] < 0.6
        left = 60 * GIB - found["weights_fp8_bytes"]
        assert found["cache_blocks"] == int(left * 0.9) // found["kv_bytes_per_block"]
        monkeypatch.setenv("HOCKET_FP8", "0")
        assert held_by_first_rank(config).fp8_bytes is None


# -- options -----------------------------------------------------------------------------------------------------------


def test_every_option_is_accounted_for() -> None:
    assert {*BECAME, *NOT_KEPT} == {option.name for option in fields(Options)}
    assert not {*BECAME} & {*NOT_KEPT}


ASKED: list[dict[str, Any]] = [
    {},
    DBO,
    {**WIDE, "ubatch_size": 3, "ubatch_executor": "thread", "ubatch_cut": "cost"},
    {"data_parallel_size": 2, "expert_placement_strategy": "round_robin"},
    {"enable_expert_parallel": True, "deterministic": True},
    {"enable_chunked_prefill": False, "max_num_seqs": 3000},
    {**WIDE, "cudagraph_capture_sizes": "2,900", "max_num_seqs": 100, "max_nccl_ctas": 4, "enforce_eager": True},
    {**WIDE, "max_cudagraph_capture_size": 64, "kv_cache_memory_bytes": 1 << 24, "gpu_memory_utilization": 0.5},
]


@pytest.mark.parametrize(("asked", "device"), [*product(ASKED, ("cpu", "cuda"))])
def test_what_became_of_options(asked: dict[str, Any], device: str) -> None:
    """Each row is a difference that is really there, with a reason; and no difference is left out."""
    options, config, why, _ = resolve_what_can_be(Options.from_dict({**asked, "device": device}), gpus=2)
    rows = resolved_options(options, config, why)
    assert all(one["why"] for one in rows)
    assert why.keys() <= BECAME.keys()
    for one in rows:
        assert one["given"] == getattr(options, one["option"]) != one["became"]
    names = {one["option"] for one in rows}
    assert {"max_model_len", "block_size", "async_scheduling"} <= names
    assert {"seed", "step_timeout", "load_format"}.isdisjoint(names)


def test_reasons_are_those_of_the_branch_that_decided() -> None:
    _, whole = resolve_and_say(Options(enable_chunked_prefill=False, device="cpu"))
    _, cut = resolve_and_say(Options(device="cpu", enforce_eager=True))
    assert whole["max_num_batched_tokens"].endswith("as prompts are not chunked, max_model_len")
    assert not cut["max_num_batched_tokens"].endswith("max_model_len")
    assert cut["cudagraph_capture_sizes"] == "a CPU has no CUDA graphs"
    _, eager = resolve_and_say(Options(device="cuda", enforce_eager=True), gpus=1)
    assert eager["cudagraph_capture_sizes"] == "enforce_eager"
    for ranks, name in ((9, "allgather_reducescatter"), (10, "torch")):
        options = Options(model=V3, data_parallel_size=ranks, enable_expert_parallel=True, device="cuda")
        config, why = resolve_and_say(options, gpus=ranks)
        assert config.parallel.all2all_backend == name
        many = "no more than" if ranks == 9 else "more than"
        assert why["all2all_backend"] == f"a token has {ranks - 1} other ranks, {many} the experts it chooses (8)"
    assert "all2all_backend" not in resolve_and_say(replace(options, all2all_backend="torch"), gpus=10)[1]


def test_what_is_refused_is_named_and_left_out() -> None:
    asked = {"enable_dbo": True, "tensor_parallel_size": 2, "attention_backend": "flashinfer", "device": "cpu"}
    found, error = describe(Options.from_dict(asked), GIB)
    assert [one["option"] for one in found["refused"]] == [
        "tensor_parallel_size",
        "attention_backend",
        "enable_dbo",
    ]
    assert str(error) == found["refused"][0]["why"]
    assert found["num_ubatches"] == 1
    assert found["backends"]["attention"]["name"] == "sdpa"


def test_what_was_not_given_cannot_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "two")
    with pytest.raises(ConfigError, match="HOCKET_FORCE_SPLIT"):
        describe(Options())


# -- GPUs that are not here --------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describing, "num_gpus", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", lambda: pytest.fail("CUDA was started"))
    monkeypatch.setattr("hocket.explain.memory.gpu_free_bytes", lambda: None)
    shape = {"model": V3, "data_parallel_size": 8, "enable_expert_parallel": True, "device": "cuda"}
    found = described(None, **shape, max_num_seqs=64)
    assert (found["gpus_here"], found["assumed_gpus"]) == (0, 8)
    assert found["graphs"] == {"sizes": [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64], "split_sizes": [], "uncapturable": []}
    assert found["backends"]["attention"]["name"] == "flashinfer"
    assert found["backends"]["experts"]["name"] == "triton_grouped"
    assert found["memory"]["free_bytes"] is None
    graphs = {tuple(set(one["tokens"])): one for one in found["steps"] if one["phase"] == "decode"}
    assert graphs[(64,)]["graph_tokens"] == 64
    eager = described(None, **shape, all2all_backend="torch")
    assert eager["graphs"]["uncapturable"] == ["transport torch"]
    assert {one["graph"] for one in eager["steps"] if one["phase"] == "decode"} == {"eager_forced"}
    wide = described(None, **shape, dtype="float32")
    assert "no kernels for float32" in wide["backends"]["attention"]["why"]
    assert wide["graphs"]["uncapturable"] == ["attention backend sdpa"]


# -- the command -------------------------------------------------------------------------------------------------------


FLAGS = ("--data-parallel-size", "2", "--enable-expert-parallel", "--enable-dbo")


def shown(**options: Any) -> str:
    """What the command prints, of options that are not refused."""
    text = io.StringIO()
    show(described(**options), console(file=text))
    return text.getvalue()


def test_what_is_printed() -> None:
    text = shown(**DBO)
    assert "compute │ A0₁ A1₁ │ M₀" in text
    assert "tokens per rank 1–31: below_threshold, 32–256: split" in text
    assert "allgather_reducescatter ← chosen" in text
    assert all(len(line) <= 100 for line in text.splitlines() if "launched" not in line)


def test_command() -> None:
    command = [sys.executable, "-m", "hocket.cli.main", "explain", *FLAGS, "--max-nccl-ctas", "4", "--memory-gib", "4"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == described(**DBO, max_nccl_ctas=4)


def test_a_refusal_is_one_line_and_the_rest_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hocket", "explain", "--enable-dbo", "--memory-gib", "4"])
    with logging_kept():
        assert main() == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1
    assert "enable_dbo" in err
    assert "✗ refused, and left out of the above: enable_dbo" in out
    assert "every step runs whole" in out


@contextmanager
def logging_kept() -> Iterator[None]:
    """The command sets up this process's logging."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


def test_what_never_splits_is_said_and_who_forces_it(monkeypatch: pytest.MonkeyPatch) -> None:
    never = shown(**DBO, max_num_batched_tokens=100, max_num_seqs=10)
    assert "no step can be split: lower the thresholds" in never
    assert "launched" not in never
    monkeypatch.setenv("HOCKET_FORCE_SPLIT", "2")
    assert "every step: HOCKET_FORCE_SPLIT is set" in shown()
