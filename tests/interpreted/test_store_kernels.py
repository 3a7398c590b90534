"""Rows stored in the paged cache, and keys of heads, in Triton's interpreter: the same bits as the plain way, and
nothing beside them."""

from __future__ import annotations

import fake_flashinfer as plain
import pytest
import torch
from torch import Tensor

from hocket.attention import latent_calls, store
from hocket.attention.expanded_keys import expanded_keys

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")
NUM_BLOCKS, BLOCK_SIZE = 5, 3


def some_slots(num_slots: int) -> Tensor:
    """int64 [num_slots], all different, but for the second and then every fourth, which are nowhere."""
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(num_slots))[:num_slots]
    slots[1::4] = -1
    return slots


@pytest.mark.parametrize("num_slots", [0, 1, 7])
@pytest.mark.parametrize(("num_heads", "width"), [(1, 1), (3, 20), (2, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values(num_slots: int, num_heads: int, width: int, dtype: torch.dtype) -> None:
    """Of a merged projection, with two rows of padding behind the last slot."""
    merged = torch.randn(num_slots + 2, 4 * num_heads, width).to(dtype)
    key, value = merged[:, num_heads : 2 * num_heads], merged[:, 3 * num_heads :]
    found = torch.randn(2, NUM_BLOCKS, BLOCK_SIZE, num_heads, width).to(dtype)
    expected, slots = found.clone(), some_slots(num_slots)
    store.store_kv(found, key, value, slots)
    plain.store_kv(expected, key, value, slots)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_slots", [0, 1, 7])
@pytest.mark.parametrize("width", [1, 40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_rows(num_slots: int, width: int, dtype: torch.dtype) -> None:
    latent = torch.randn(num_slots + 2, width + 8).to(dtype)[:, :width]
    found = torch.randn(NUM_BLOCKS, BLOCK_SIZE, width).to(dtype)
    expected, slots = found.clone(), some_slots(num_slots)
    store.store_latent(found, latent, slots)
    plain.store_latent(expected, latent, slots)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize(("num_heads", "plain", "rotated", "value"), [(1, 1, 2, 1), (3, 20, 6, 12), (20, 16, 8, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_of_heads(
    num_tokens: int, num_heads: int, plain: int, rotated: int, value: int, dtype: torch.dtype
) -> None:
    """Of latents whose rows lie apart."""
    latent_width = 7
    expanded = torch.randn(num_tokens, num_heads, plain + value).to(dtype)
    context = torch.randn(num_tokens, latent_width + rotated + 3).to(dtype)[:, : latent_width + rotated]
    found = expanded_keys(expanded, context, plain, latent_width)
    assert found.is_contiguous()
    assert torch.equal(found, latent_calls._keys(expanded, context, plain, latent_width))
