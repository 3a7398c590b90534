"""`hocket bench step` and `layer` on two ranks of a CPU: every cell is measured, and the results hang together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RANKS = ("--data-parallel-size", "2", "--enable-expert-parallel", "--device", "cpu")
RATES = ("--bytes-per-s", "1e10", "--flops-per-s", "5e10")
STEPS = ("--context", "40", "--num-steps", "4", "--num-prefill-steps", "2", "--max-num-batched-tokens", "64")
KEYS = {
    *("model", "layers", "dtype", "phase", "tokens_per_gpu", "context", "transport", "experts", "attention", "graphs"),
    *("strategy", "link", "step_us", "floor_us", "floor", "comm_us", "tokens_per_s", "spread", "kernels_per_step"),
    *("replay_us", "parts_us"),
}
LANE_KEYS = {
    *("serial_us", "step_us", "compute_us", "compute_halves_us", "comm_us", "comm_halves_us", "bound_us"),
    *("exposed_comm_us", "exposed_from", "lanes", "num_ubatches", "output_us", "layer_us", "layer_bound_us"),
}


def bench(*args: str) -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hocket.cli.main", "bench", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    return done.returncode, done.stdout, done.stderr


def report_of(*args: str) -> dict[str, Any]:
    code, out, err = bench(*args)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_steps_of_both_phases(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    sweep = ("--tokens-per-gpu", "2,4", "--repeats", "2", "--count-kernels", "--output", str(path))
    report = report_of("step", "--model", "tiny", *RANKS, *RATES, *STEPS, *sweep)
    assert json.loads(path.read_text()) == report
    rows = report["rows"]
    assert [(row["phase"], row["tokens_per_gpu"]) for row in rows] == [("decode", 2), ("decode", 4), ("prefill", 64)]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["link"] == {"kind": "real", "gb_per_s": None, "latency_us": None}
        low, high = row["spread"]["step_us"]
        assert 0 < low <= row["step_us"] <= high
        assert row["tokens_per_s"] == pytest.approx(row["tokens_per_gpu"] / row["step_us"] * 1e6)
        assert row["spread"]["tokens_per_s"][1] == pytest.approx(row["tokens_per_gpu"] / low * 1e6)
        assert 0 < row["comm_us"] < row["step_us"]
        floor = row["floor"]
        assert row["floor_us"] == pytest.approx(max(floor["bytes"] / 1e4, floor["flops"] / 5e4))
        assert (row["repeats"], row["kernels"], row["kernels_per_step"]) == (2, None, None), (
            "there are no kernels to count on a CPU"
        )
        assert row["steps"] >= (2 if row["phase"] == "prefill" else 4)
        assert row["computed_prompt_tokens"] == row["prompt_len"] * row["num_requests"], "every prompt is new"
    assert abs(rows[0]["context"] - 40) <= 1
    assert report["ready_s"] > 0
    code, out, err = bench("table", str(path))
    assert (code, err) == (0, "")
    assert out.count("\n| decode | ") == 2


def test_a_slice_over_an_emulated_link_without_rates() -> None:
    """A dense layer and a sparse one of four experts a rank, as at EP-4 of 16. Without rates there is no floor."""
    shape = ("--slice-of-ep", "4", "--num-layers", "2", "--load-format", "dummy", "--dtype", "bfloat16")
    link = ("--emulate-link-gb-per-s", "1", "--emulate-link-latency-us", "200")
    steps = ("--context", "12", "--num-steps", "2", "--max-num-batched-tokens", "16", "--repeats", "1")
    cells = ("--phase", "decode", "--tokens-per-gpu", "2", "--reuse-prompts", "--block-size", "2")
    (row,) = report_of("step", "--model", "tiny", *RANKS, *shape, *link, *steps, *cells)["rows"]
    assert (row["model"], row["layers"], row["dtype"]) == ("tiny", 2, "bfloat16")
    assert row["slice"] == {"of_ep": 4, "model_experts": 16, "experts_per_rank": 4, "rows_per_expert_and_token": 1.0}
    volume = {"dispatch_bytes_per_token": 2 * (192 + 2 * 4), "combine_bytes_per_token": 2 * 192 * 2}
    assert row["link"] == {"kind": "emulated", "gb_per_s": 1.0, "latency_us": 200.0} | volume
    assert row["comm_us"] >= 2 * 200, "a dispatch and a combine in the sparse layer"
    assert row["computed_prompt_tokens"] <= 2 * 2, "of two prompts less than a block each is not cached"
    assert row["floor_us"] is None
    read = 4 * (1 - (1 - 4 / 8) ** 4)  # of four experts here and eight in all, by four tokens that choose four each
    assert row["floor"]["parts"]["experts"]["bytes"] == read * 3 * 192 * 64 * 2


def test_strategies_beside_their_bound() -> None:
    """Over a link of 2 ms and little bandwidth, of whose bytes a slice's own volume counts."""
    shape = ("--slice-of-ep", "4", "--num-layers", "2", "--num-dense-layers", "0", "--load-format", "dummy")
    link = ("--emulate-link-gb-per-s", "0.1", "--emulate-link-latency-us", "2000")
    cells = ("--tokens-per-gpu", "8", "--repeats", "2", "--strategies", "serial,dual_batch")
    rows = report_of("step", "--model", "tiny", *RANKS, *RATES, *STEPS, *shape, *link, *cells)["rows"]
    kinds = [(row["phase"], row["tokens_per_gpu"], row["strategy"]) for row in rows]
    phases = (("decode", 8), ("prefill", 64))
    assert kinds == [(*phase, strategy) for phase in phases for strategy in ("serial", "dual_batch")]
    out, back = 2 * (192 + 2 * 4), 2 * 192 * 4  # of four copies two leave: a byte for each of 192 elements, and scales
    for serial, dual in zip(rows[::2], rows[1::2], strict=True):
        assert (serial["split"][0], dual["num_ubatches"]) == (0, 2)
        assert dual["split"][0] >= dual["steps"]
        for row in (serial, dual):
            assert row.keys() >= KEYS | LANE_KEYS
            assert row["serial_us"] == serial["step_us"]
            assert row["bound_us"] == max(row["compute_halves_us"], row["comm_halves_us"])
            num_bytes = 2 * row["tokens_per_gpu"] * (out + back)
            assert row["lanes"]["bytes"] == {"comm": num_bytes, "comm_halves": num_bytes}
            assert 0 < row["output_us"] < row["compute_us"]
            layers = max(row["compute_halves_us"] - row["output_us"], row["comm_halves_us"])
            assert row["layer_bound_us"] == pytest.approx(layers / 2)
            assert row["layer_us"] == pytest.approx((row["step_us"] - row["output_us"]) / 2)
            link_us = num_bytes / 0.1 / 1e3
            assert row["comm_us"] >= link_us + 4 * 2000, "a dispatch and a combine in each of two layers"
            assert row["comm_halves_us"] >= link_us + 8 * 2000
            assert 0 < row["exposed_comm_us"] < row["step_us"]
            assert row["exposed_from"] == "lanes"
            assert row["link"]["dispatch_bytes_per_token"] == out
            for name in ("serial_us", "compute_halves_us", "comm_us"):
                low, high = row["spread"][name]
                assert 0 < low <= row[name] <= high
        assert serial["step_us"] >= serial["comm_us"], "nothing hides a transfer but the shared experts' part of it"
        assert dual["floor"]["bytes"] > dual["floor"]["unsplit"]["bytes"] == serial["floor"]["bytes"]


def test_every_prefill_is_computed_though_decodes_find_their_prompts() -> None:
    cells = ("--tokens-per-gpu", "4", "--phase", "prefill", "--repeats", "1", "--strategies", "serial,dual_batch")
    serial, dual = report_of("step", "--model", "tiny", *RANKS, *STEPS, *cells, "--reuse-prompts")["rows"]
    assert (
        serial["computed_prompt_tokens"]
        == dual["computed_prompt_tokens"]
        == serial["prompt_len"] * serial["num_requests"]
    )


def test_what_cannot_be_split_is_said_and_left_out() -> None:
    few = ("--tokens-per-gpu", "1", "--phase", "decode", "--repeats", "1", "--strategies", "serial,dual_batch,serial")
    code, out, err = bench("step", "--model", "tiny", *RANKS, *STEPS, *few)
    assert code == 0
    (row,) = json.loads(out.splitlines()[-1])["rows"]
    assert (row["strategy"], row["serial_us"]) == ("serial", row["step_us"])
    assert "dual_batch of a decode of 1 tokens: 0 of" in err
    assert "below_threshold" in err
    assert "overlap is on" not in err, "the benchmark itself says what is split"


@pytest.mark.parametrize(
    ("given", "variables", "said"),
    [
        (("--strategies", "serial,both"), {}, "strategies"),
        (("--strategies", "dual_batch"), {"HOCKET_FORCE_SPLIT": "2"}, "HOCKET_FORCE_SPLIT"),
        (("--strategies", "dual_batch", "--data-parallel-size", "1"), {}, "data_parallel_size"),
        (("--link-dispatch", "int4"), {}, "link_dispatch"),
    ],
)
def test_wrong_use_is_said_before_anything_starts(
    given: tuple[str, ...], variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, _, err = bench("step", "--model", "tiny", *RANKS, *STEPS, "--tokens-per-gpu", "4", *given)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_cache_without_room_for_the_requests_is_named() -> None:
    """Four requests of about 45 tokens; the cache holds three blocks of 16 for each of two."""
    few = ("--tokens-per-gpu", "4", "--phase", "decode", "--repeats", "1", "--kv-cache-memory-bytes", "184320")
    code, _, err = bench("step", "--model", "tiny", *RANKS, *STEPS, *few)
    assert code == 1
    assert "steps were a decode of 4 tokens on every rank" in err


def test_throughput_says_what_it_was_measured_with(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    few = ("--num-prompts", "8", "--input-len", "8", "--output-len", "8", "--repeats", "1", "--output", str(path))
    overlap = ("--enable-dbo", "--dbo-decode-token-threshold", "2")
    (row,) = report_of("throughput", "--model", "tiny", *RANKS, *overlap, *few)["rows"]
    assert (row["device"], row["num_ranks"], row["strategy"]) == ("cpu", 2, "2 ubatches")
    assert row["overlap"]["decode_token_threshold"] == 2
    num_split, num_steps = row["split"]
    assert 7 <= num_split <= num_steps, "seven decodes of four requests a rank"
    assert (row["attention"], row["experts"]) == ("sdpa", "grouped_mm")
    code, out, err = bench("table", str(path))
    assert (code, err) == (0, "")
    assert "overlap 2 ubatches" in out


def test_a_layer_with_each_pair_of_backends() -> None:
    backends = ("--experts", "grouped_mm,reference", "--transports", "torch,allgather_reducescatter")
    sweep = ("--tokens-per-gpu", "4,16", "--repeats", "2", "--rounds", "2")
    rows = report_of("layer", "--model", "tiny", *RANKS, *RATES, *backends, *sweep)["rows"]
    pairs = [(t, e) for t in ("torch", "allgather_reducescatter") for e in ("grouped_mm", "reference")]
    assert [(row["transport"], row["experts"], row["tokens_per_gpu"]) for row in rows] == [
        (*pair, tokens) for pair in pairs for tokens in (4, 16)
    ]
    for row in rows:
        assert row["rows_per_expert"] == row["tokens_per_gpu"] * 2 * 4 / 16
        for part in ("router_us", "dispatch_us", "experts_us", "combine_us", "layer_us"):
            assert 0 < row[part]["min"] <= row[part]["median"] <= row[part]["max"]
        assert row["floor_us"] == pytest.approx(max(row["floor"]["bytes"] / 1e4, row["floor"]["flops"] / 5e4))
        assert not row["graphs"]


def test_a_layer_on_one_rank() -> None:
    (row,) = report_of("layer", "--model", "tiny", "--device", "cpu", "--tokens-per-gpu", "4", "--repeats", "1")["rows"]
    assert (row["transport"], row["num_ranks"], row["rows_per_expert"]) == ("local", 1, 1.0)


def test_a_rank_of_the_layer_that_fails_is_named() -> None:
    code, _, err = bench("layer", "--model", "tiny", *RANKS, "--kv-cache-memory-bytes", "1", "--tokens-per-gpu", "4")
    assert code == 1
    assert "rank " in err
    assert "the KV cache has room for 0 blocks" in err
