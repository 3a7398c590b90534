"""Latent decode in Triton's interpreter against scaled_dot_product_attention in fp32, as the backend captures it.

Blocks nobody wrote and what lies past a context in its last block are NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import fake_flashinfer
import pytest
import torch
from attention_steps import Step
from torch import Tensor

from hocket.attention.base import AttentionMetadata
from hocket.attention.flashinfer import FlashInferAttention
from hocket.attention.flashinfer_library import HeadShapes
from hocket.attention.registry import SdpaAttention
from hocket.attention.triton_mla import LatentDecodes, Tuning, num_pieces
from hocket.config.model import MLAConfig

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
CPU = torch.device("cpu")
NAN = float("nan")
MLA = MLAConfig(q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=6, qk_rope_head_dim=16, v_head_dim=8)
WIDTH, MOST = 48, 256
LENGTHS = ([1, 1, 1, 1, 1], [16, 17, 15, 64, 1], [1, 1, 200, 1, 33], [70, 70, 70, 70, 70], [5, 130, 1, 1, 1])
TILES = [(16, 16), (4, 16), (16, 32), (64, 32), (64, 64)]
"""Tokens of a block and of a tile."""


@pytest.fixture(autouse=True)
def _own_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOCKET_MLA_DECODE", "triton")
    with fake_flashinfer.installed():
        yield


@dataclass
class Decode:
    """Requests of `lens` tokens, the last of them new."""

    meta: AttentionMetadata
    cache: Tensor
    query: Tensor
    latent: Tensor
    kv_b: Tensor
    block_size: int

    @classmethod
    def draw(cls, lens: list[int], block_size: int, num_heads: int, seed: int = 0) -> Decode:
        generator = torch.Generator().manual_seed(seed)
        step = Step([n - 1 for n in lens], [1] * len(lens), block_size, 0)
        meta = step.metadata(generator)
        cache = torch.full((step.num_blocks, block_size, WIDTH), NAN)
        for r, past in enumerate(step.past):
            slots = torch.tensor(step.slots_of(meta, r, past), dtype=torch.int64)
            cache.flatten(0, 1)[slots] = torch.randn(past, WIDTH, generator=generator)
        return cls(
            meta=meta,
            cache=cache,
            query=torch.randn(len(lens), num_heads, 22, generator=generator) * 2,
            latent=torch.randn(len(lens), WIDTH, generator=generator),
            kv_b=torch.randn(num_heads, 14, 32, generator=generator) * 32**-0.5,
            block_size=block_size,
        )

    @property
    def expected(self) -> Tensor:
        sdpa = SdpaAttention()
        plan = sdpa.plan(self.meta, len(self.query), self.block_size, torch.float32, slot_bytes=1)
        return sdpa.latent(self.query, self.latent, self.kv_b, self.cache.clone(), plan, 0.3)


def backend(num_heads: int, num_slots: int, tile: int) -> FlashInferAttention:
    heads = HeadShapes(num_heads=num_heads, num_kv_heads=num_heads, head_dim=22, scale=0.3, mla=MLA)
    attention = FlashInferAttention(heads, CPU)
    assert attention._own_latents is not None
    attention._own_latents = LatentDecodes(heads, num_slots, CPU, Tuning(tile=tile, programs_per_sm=1))
    return attention


def check(attention: FlashInferAttention, all_lens: tuple[list[int], ...], block_size: int, num_heads: int) -> None:
    """One plan for all of them."""
    plan = attention.decode_plan(len(all_lens[0]), MOST, block_size, torch.float32, slot_bytes=1)
    for seed, lens in enumerate(all_lens):
        decode = Decode.draw(lens, block_size, num_heads, seed)
        attention.update(plan, decode.meta)
        found = attention.latent(decode.query, decode.latent, decode.kv_b, decode.cache.clone(), plan, 0.3)
        torch.testing.assert_close(found, decode.expected, atol=2e-5, rtol=0, msg=lambda m, n=lens: f"{n}: {m}")


@pytest.mark.parametrize("num_slots", [1, 3, 8, 30])
@pytest.mark.parametrize(("block_size", "tile"), TILES)
def test_as_sdpa(block_size: int, tile: int, num_slots: int) -> None:
    """Programs have several contexts, or contexts several programs."""
    check(backend(3, num_slots, tile), LENGTHS, block_size, 3)


@pytest.mark.parametrize("num_heads", [1, 16, 20])
def test_heads(num_heads: int) -> None:
    """Of fewer and more than a program has."""
    check(backend(num_heads, 6, 16), LENGTHS[1:3], 16, num_heads)


@pytest.mark.parametrize("lens", [[1], [200], [16]])
def test_one_request(lens: list[int]) -> None:
    """In more parts than are merged at once, and in one."""
    check(backend(2, 20, 16), (lens,), 16, 2)


def test_large_scores_overflow_nothing() -> None:
    """A context whose scores rise from part to part, to where their exponentials are infinite."""
    attention = backend(3, 6, 16)
    decode = Decode.draw([200, 90], 16, 3)
    decode.query *= 100
    plan = attention.decode_plan(2, MOST, 16, torch.float32, slot_bytes=1)
    attention.update(plan, decode.meta)
    found = attention.latent(decode.query, decode.latent, decode.kv_b, decode.cache.clone(), plan, 0.3)
    torch.testing.assert_close(found, decode.expected, atol=1e-3, rtol=0)


def test_the_workspace_is_shared() -> None:
    latents = backend(3, 6, 16)._own_latents
    assert latents is not None
    small, large, other = (latents.make({"lens": torch.ones(n, dtype=torch.int32)}, 16) for n in (1, 40, 30))
    assert small._partial.data_ptr() != large._partial.data_ptr() == other._partial.data_ptr()


@pytest.mark.parametrize("num_slots", [1, 7, 132])
def test_pieces(num_slots: int) -> None:
    """At least one for each request; whole waves, but for a tenth at most, and then a multiple of the requests."""
    for num_rows in range(1, 600):
        found = num_pieces(num_rows, num_slots)
        assert found >= num_rows
        assert found % num_slots == 0 or (found % num_rows == 0 and -found % num_slots <= 0.1 * (found + num_slots))
    assert [num_pieces(n, 132) for n in (64, 128, 256, 300)] == [128, 128, 256, 396]
