"""The floor of a step against numbers worked out by hand from the published shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hocket.bench import rates
from hocket.bench.floor import Part, Rates, StepShape, distinct_experts, floor_of, split_parts, step_parts
from hocket.bench.rates import GivenRates, rates_of
from hocket.config.model import ModelConfig
from hocket.errors import ConfigError, HocketError

SHAPES = Path(__file__).resolve().parents[2] / "benchmarks" / "shapes"
H200 = Rates(bytes_per_s=4.3e12, flops_per_s=780e12, fp8_flops_per_s=1560e12, source="given")
V2_EXPERT = 3 * 2048 * 1408
V2_ATTENTION = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048


def model(name: str) -> ModelConfig:
    return ModelConfig.from_pretrained(SHAPES / name)


def parts(config: ModelConfig, step: StepShape, ep_size: int = 2, *, is_fp8: bool = False) -> dict[str, Part]:
    return {part.name: part for part in step_parts(config, step, ep_size, "bfloat16", is_fp8=is_fp8)}


def test_decode_of_v2_lite_on_two_ranks() -> None:
    """26 sparse layers of 32 local experts; 27 caches of 576 wide rows; everything read once in two bytes."""
    found = parts(model("deepseek-v2-lite"), StepShape.decode(64, 1056))
    assert found["experts"].num_bytes == pytest.approx(26 * 32 * V2_EXPERT * 2, rel=1e-5)  # 14.4 GB
    assert found["experts"].flops == 26 * 64 * 6 * V2_EXPERT * 2
    assert found["projections"].num_bytes == 27 * V2_ATTENTION * 2
    assert found["projections"].flops == 27 * V2_ATTENTION * 2 * 64
    assert found["shared_experts"].num_bytes == 26 * 2 * V2_EXPERT * 2
    assert found["dense_mlp"].num_bytes == 3 * 2048 * 10944 * 2
    assert found["logits"].num_bytes == 102400 * 2048 * 2
    assert found["router"].num_bytes == 26 * 64 * 2048 * 2
    assert found["attention"].num_bytes == 27 * 64 * 1056 * 576 * 2
    assert found["attention"].flops == 27 * 64 * 1056 * 16 * (576 + 512) * 2


@pytest.mark.parametrize(("num_requests", "cache_gb", "ms"), [(64, 2.1, 4.35), (128, 4.2, 4.84), (256, 8.4, 5.82)])
def test_the_bytes_bound_small_decodes(num_requests: int, cache_gb: float, ms: float) -> None:
    """(14.4 + 2.2 + cache) GB at 4.3 TB/s."""
    found = step_parts(model("deepseek-v2-lite"), StepShape.decode(num_requests, 1056), 2, "bfloat16")
    floor = floor_of(found, H200)
    gb = {name: value["bytes"] / 1e9 for name, value in floor["parts"].items()}
    others = sum(value for name, value in gb.items() if name not in ("experts", "attention"))
    assert (gb["experts"], others, gb["attention"]) == pytest.approx((14.4, 2.2, cache_gb), abs=0.05)
    assert floor["us"] == pytest.approx(floor["bytes"] / 4.3e6)
    assert floor["us"] / 1e3 == pytest.approx(ms, abs=0.01)


@pytest.mark.parametrize("num_ubatches", [1, 2, 3])
def test_every_ubatch_reads_the_weights(num_ubatches: int) -> None:
    """V2-Lite at 64 requests: 14.4 GB of experts and 1.75 of other weights each time, 2.1 of cache and 0.42 of the
    output layer once. Experts that nobody chose are not read."""
    chosen = 1 - (1 - 6 / 64) ** (2 * 64 / num_ubatches)
    gb = num_ubatches * (14.4 * chosen + 1.75) + 2.1 + 0.42
    step = StepShape.decode(64, 1056)
    whole = step_parts(model("deepseek-v2-lite"), step, 2, "bfloat16")
    split = split_parts(model("deepseek-v2-lite"), step, 2, "bfloat16", num_ubatches)
    assert sum(part.num_bytes for part in split) / 1e9 == pytest.approx(gb, abs=0.05 * num_ubatches)
    assert sum(part.flops for part in split) == pytest.approx(sum(part.flops for part in whole))
    assert [part.name for part in split] == [part.name for part in whole]


def test_one_part_after_the_other_takes_longer_than_both_at_once() -> None:
    reads = Part(name="reads", num_bytes=4.3e9, flops=0)
    computes = Part(name="computes", num_bytes=0.43e9, flops=1.56e9 * 780, is_fp8=True)
    floor = floor_of([reads, computes], H200)
    assert floor["us"] == pytest.approx(1100)
    assert floor["serial_us"] == pytest.approx(1000 + 780)


def test_flops_bound_a_prefill() -> None:
    """4096 tokens in prompts of 1024: a token sees 512.5 keys on average, in heads of 192 + 128, un-absorbed."""
    found = parts(model("deepseek-v2-lite"), StepShape.prefill(4096, 1024))
    assert found["attention"].flops == 27 * 4096 * 512.5 * 16 * (192 + 128) * 2
    assert found["logits"].flops == 4 * 102400 * 2048 * 2, "four prompts end in the step"
    floor = floor_of(list(found.values()), H200)
    assert floor["us"] == pytest.approx(floor["flops"] / 780e6)


def test_grouped_queries() -> None:
    """Qwen3-30B-A3B: 32 query and 4 key/value heads of 128; 48 layers, all sparse, without shared experts."""
    found = parts(model("qwen3-30b-a3b"), StepShape.decode(64, 1000), 1)
    assert found["projections"].num_bytes == 48 * 2048 * 128 * (32 + 4 + 4 + 32) * 2
    assert found["attention"].num_bytes == 48 * 64 * 1000 * 2 * 4 * 128 * 2
    assert found["attention"].flops == 48 * 64 * 1000 * 32 * 2 * 128 * 2
    assert (found["dense_mlp"].num_bytes, found["shared_experts"].num_bytes) == (0, 0)


def test_fp8_halves_the_bytes_of_quantised_weights() -> None:
    """Projections and experts: one byte and a scale of four per 128 × 128 block. Cache, router and logits stay."""
    config, step = model("deepseek-v3-fp8"), StepShape.decode(64, 1024)
    assert config.quantization is not None
    plain, fp8 = parts(config, step, 32), parts(config, step, 32, is_fp8=True)
    for name in ("projections", "dense_mlp", "shared_experts", "experts"):
        assert fp8[name].num_bytes == pytest.approx(plain[name].num_bytes * (0.5 + 2 / 128**2))
        assert fp8[name].flop_s(H200) == pytest.approx(plain[name].flop_s(H200) / 2)
    for name in ("attention", "router", "logits"):
        assert fp8[name] == plain[name]


def test_only_experts_with_a_row_are_read() -> None:
    assert distinct_experts(64, 2, 1, 6) == pytest.approx(3.0), "one token chooses six of 64, half of them here"
    assert distinct_experts(64, 2, 2, 6) == pytest.approx(32 * (1 - (58 / 64) ** 2))
    assert distinct_experts(64, 2, 10_000, 6) == pytest.approx(32.0)
    few, config = StepShape.decode(1, 100), model("deepseek-v2-lite")
    assert parts(config, few)["experts"].num_bytes == pytest.approx(26 * distinct_experts(64, 2, 2, 6) * V2_EXPERT * 2)
    assert parts(config, few, 1)["experts"].num_bytes == pytest.approx(26 * 6 * V2_EXPERT * 2)


def test_without_rates_there_are_bytes_but_no_time() -> None:
    floor = floor_of(step_parts(model("deepseek-v2-lite"), StepShape.decode(1, 8), 1, "float32"), None)
    assert floor["bytes"] > 0
    assert (floor["us"], floor["serial_us"], floor["rates"]) == (None, None, None)


def test_rates_are_given_or_not_on_a_cpu() -> None:
    assert rates_of("cpu", GivenRates()) is None
    both = GivenRates(bytes_per_s=1e10, flops_per_s=2e10)
    found = Rates(bytes_per_s=1e10, flops_per_s=2e10, fp8_flops_per_s=4e10, source="given")
    assert rates_of("cpu", both) == found
    assert rates_of("cpu", replace(both, fp8_flops_per_s=3e10)) == replace(found, fp8_flops_per_s=3e10)
    with pytest.raises(ConfigError, match="bytes_per_s"):
        rates_of("cpu", GivenRates(flops_per_s=1e10))
    for part in (GivenRates(bytes_per_s=1e10), GivenRates(fp8_flops_per_s=1e10)):
        with pytest.raises(ConfigError, match="flops_per_s"):
            rates_of("cpu", part)


def test_what_is_not_given_is_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measured", lambda: {"bytes_per_s": 4e12, "flops_per_s": 7e14})
    found = rates_of("cuda", GivenRates())
    assert found == Rates(bytes_per_s=4e12, flops_per_s=7e14, fp8_flops_per_s=1.4e15, source="measured at start")
    part = rates_of("cuda", GivenRates(flops_per_s=8e14))
    assert part is not None
    assert (part.bytes_per_s, part.flops_per_s) == (4e12, 8e14)
    assert "in part" in part.source


def test_a_measurement_that_fails_says_what_to_do() -> None:
    """There is no GPU to measure where these tests run, or it is hidden from the process that would."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(HocketError, match=r"cannot be measured \(.+\); give --bytes-per-s and --flops-per-s"):
            rates.measured()
