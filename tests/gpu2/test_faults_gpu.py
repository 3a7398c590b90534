"""A rank that stalls, is killed or fails on two GPUs, with overlap on: it is named within a step's limit, no process of
ours is left, and neither is anything that they held of the GPUs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpus
import pytest
from bf16_answers import SHAPES
from gloo_groups import poll_to_the_end
from patched_ranks import patched_ranks
from planted_captures import CAPTURE_PLANT
from planted_steps import PLANT_FILE

from hocket.config.options import Options
from hocket.dist.launcher import RankGroup
from hocket.errors import RankLost, UBatchFailed
from hocket.llm import LLM
from hocket.moe.transport.deepep_library import unavailable_reason
from hocket.request import SamplingParams

STEP_TIMEOUT_S = 10.0
NAMED_WITHIN_S = STEP_TIMEOUT_S + 5.0
"""Who is late is known after the limit; then the front waits for what the others may have to say."""
REACHED_WITHIN_S = 20.0
TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "n_routed_experts": 16,
    "moe_intermediate_size": 256,
    "vocab_size": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Of DeepSeek-V2-Lite, whose width DeepEP's kernels take."""
COMMON: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "device": "cuda",
    "dtype": "bfloat16",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "flashinfer",
    "moe_backend": "triton_grouped",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "cudagraph_capture_sizes": "4",
    "kv_cache_memory_bytes": 64 << 20,
    "enable_dbo": True,
    "dbo_decode_token_threshold": 2,
    "dbo_prefill_token_threshold": 2,
    "step_timeout": STEP_TIMEOUT_S,
}
PER_RANK, MAX_TOKENS = 4, 1000
"""As many requests as the graph has rows, so that each ubatch has some; the fault comes long before they end."""
FAULTS = [
    (signal.SIGSTOP, "eager", "allgather_reducescatter"),
    (signal.SIGSTOP, "eager", "deepep_low_latency"),
    (signal.SIGSTOP, "graphs", "allgather_reducescatter"),
    (signal.SIGSTOP, "graphs", "deepep_low_latency"),
    (signal.SIGKILL, "eager", "deepep_low_latency"),
    (signal.SIGKILL, "graphs", "deepep_low_latency"),
]
PLACES = {"eager": "1 1 experts wait", "graphs": "1 0 replay wait"}
"""Where rank 1 is when it happens: in the midst of launching ubatch 1, or with a graph of ubatches launched."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nothing but a config.json."""
    folder = tmp_path_factory.mktemp("tiny")
    values = json.loads((SHAPES / "deepseek-v2-lite" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | TINY))
    return folder


def options_of(model: Path, transport: str, mode: str) -> Options:
    if transport.startswith("deepep") and (reason := unavailable_reason(transport, "cuda")):
        gpus.missing(reason)
    values = {"model": str(model), "all2all_backend": transport, "enforce_eager": mode == "eager", **COMMON}
    return Options.from_dict(values)


@contextmanager
def ranks(patch: str, **environment: str) -> Iterator[RankGroup]:
    """Two that are gone afterwards, with all that they held."""
    before = gpus.used_bytes()
    with patched_ranks(2, patch, **environment) as group:
        pids = list(group.pids.values())
        yield group
        assert group.closed, "the fault did not end the group"
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    gpus.assert_nothing_is_held(before)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("how", "mode", "transport"), FAULTS, ids=lambda value: getattr(value, "name", value))
def test_a_rank_stopped_or_killed_in_mid_step(
    model: Path, tmp_path: Path, how: signal.Signals, mode: str, transport: str
) -> None:
    options, file = options_of(model, transport, mode), tmp_path / "plant"
    here = file.with_name("plant.here")
    with (
        ranks("planted_steps:install", **{PLANT_FILE: str(file)}) as group,
        LLM.from_options(options, group=group) as llm,
    ):
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        llm.client.add_many([(str(i), [3 + i, 4], params, i % 2) for i in range(2 * PER_RANK)])
        for _ in range(20):
            llm.client.poll(1.0)
        file.write_text(PLACES[mode])
        deadline = time.monotonic() + REACHED_WITHIN_S
        while not here.exists():
            assert time.monotonic() < deadline, "no step was split"
            llm.client.poll(0.01)
        began = time.monotonic()
        os.kill(group.pids[1], how)
        with pytest.raises(RankLost, match=r"^rank 1 ") as caught:
            poll_to_the_end(llm)
        assert time.monotonic() - began < NAMED_WITHIN_S
        assert "\n" not in str(caught.value)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("run", [1, 3])
@pytest.mark.parametrize("transport", ["allgather_reducescatter", "deepep_low_latency"])
def test_a_ubatch_that_fails_while_it_is_captured(model: Path, transport: str, run: int) -> None:
    """In a warm-up, in which the other rank's kernels wait for its transfers, and while it is captured."""
    options = options_of(model, transport, "graphs")
    expected = "^rank 1: capturing the CUDA graph of 4 rows in 2 ubatches failed: ubatch 1, sparse layer 1, experts: "
    planted = {CAPTURE_PLANT: f"1 1 experts {run}"}
    with ranks("planted_captures:install", **planted) as group, pytest.raises(UBatchFailed, match=expected):
        LLM.from_options(options, group=group)
