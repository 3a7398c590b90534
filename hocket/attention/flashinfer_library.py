"""FlashInfer as an optional library: whether it can run here, compiling what is needed, and objects of its classes.

Knows no requests. FlashInfer's "wrapper" holds one plan in two workspaces: floats, which all wrappers may share because
kernels on a stream follow each other, and integers, of which it fills a copy on the host and sends it with a copy that
the host does not wait for; a fence says when that host memory may be written again.
"""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch

from hocket import envs
from hocket.attention.decode_buffers import Fence
from hocket.config.model import MLAConfig, ModelConfig
from hocket.layers.rotary import softmax_scale

INSTALL = (
    "pip install --no-deps flashinfer-python==0.6.13 apache-tvm-ffi==0.1.15.post2, and pip install ninja nvidia-ml-py; "
    "it compiles with the CUDA toolkit's nvcc"
)
HEAD_DIMS = (64, 128, 256)
LATENT_DIMS = (512, 64, 128, 128)
"""L, P, N, V of latent attention (DeepSeek-V2 and V3): latent, rotated, unrotated and value width."""
MAX_TRITON_HEADS = 32
"""FlashInfer's latent decode computes 64 rows of heads at a time: with fewer heads most of them are for nothing."""
MIN_CAPABILITY = (8, 0)
MAX_IDLE = 4
SIGN_OF_LIFE_S = 2.0
COMPILE_LIMIT_S = 1800.0
OnProgress = Callable[[int, int], None]
"""Takes how many are done, and of how many."""


@dataclass(frozen=True, kw_only=True)
class HeadShapes:
    """What FlashInfer's plans ask of a model: heads, their width, the softmax scale; mla: latent attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    mla: MLAConfig | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> HeadShapes:
        return cls(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=softmax_scale(config),
            mla=config.mla,
        )

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def decodes_on_tensor_cores(self) -> bool:
        """Whether grouped-query decode takes the kernel whose matrices' rows are the query heads of a key head."""
        return self.group > 3

    @property
    def decodes_latents_with_triton(self) -> bool:
        """Whether captured latent decodes take Hocket's own kernel (`triton_mla.py`); ConfigError for a value of
        HOCKET_MLA_DECODE that does not exist."""
        chosen = envs.MLA_DECODE.get_one_of("auto", "triton", "flashinfer")
        if self.mla is None:
            return False
        return chosen == "triton" or (chosen == "auto" and self.num_heads <= MAX_TRITON_HEADS)

    @property
    def unsupported(self) -> str | None:
        """What of these shapes FlashInfer has no kernel for."""
        mla = self.mla
        if mla is None:
            return None if self.head_dim in HEAD_DIMS else f"heads of {self.head_dim} (it has {HEAD_DIMS})"
        found = (mla.kv_lora_rank, mla.qk_rope_head_dim, mla.qk_nope_head_dim, mla.v_head_dim)
        what = "latent, rotated, unrotated and value widths of"
        return None if found == LATENT_DIMS else f"{what} {found} (it has {LATENT_DIMS})"


def unusable(heads: HeadShapes, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why FlashInfer cannot run such heads here; None: it can."""
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"it needs compute capability {MIN_CAPABILITY} or newer, the GPU has {capability}"
    why = without_kernels(heads, dtype)
    if why is not None:
        return why
    try:
        importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        return f"flashinfer cannot be imported ({error}): {INSTALL}"
    return None


def without_kernels(heads: HeadShapes, dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot run such heads on any GPU; None: it can on some."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it has no kernels for {str(dtype).removeprefix('torch.')}, only for bfloat16 and float16"
    return None if heads.unsupported is None else f"it has no kernels for {heads.unsupported}"


def compile_kernels(
    heads: HeadShapes, dtype: torch.dtype, device: torch.device, on_progress: OnProgress = lambda done, total: None
) -> None:
    """Compile all kernels that such heads need side by side, those that are not in the cache on disk.

    on_progress: told every SIGN_OF_LIFE_S how many modules of how many are done: it takes minutes.

    Raises:
        RuntimeError: the compiler is missing, failed or did not end.
    """
    jit, utils = importlib.import_module("flashinfer.jit"), importlib.import_module("flashinfer.utils")
    best = utils.determine_attention_backend(device, 0, False, False, dtype, dtype)
    types = (dtype, dtype, dtype, torch.int32)
    plain = (0, False, False, False)  # no position encoding, no window, no cap, no fp16 sums
    mla = heads.mla
    if mla is not None:
        specs = [
            jit.gen_batch_mla_module(
                utils.determine_mla_backend(device), *types, mla.kv_lora_rank, mla.qk_rope_head_dim, False
            ),
            jit.gen_batch_prefill_module(best, *types, mla.qk_head_dim, mla.v_head_dim, *plain),
        ]
    else:
        widths = (heads.head_dim, heads.head_dim)
        specs = [jit.gen_batch_prefill_module(best, *types, *widths, *plain)]
        if not heads.decodes_on_tensor_cores:
            specs.append(jit.gen_batch_decode_module(*types, *widths, *plain[:3]))
        elif best != "fa2":
            specs.append(jit.gen_batch_prefill_module("fa2", *types, *widths, *plain))
    # Each by its own ninja file: one for all leaves no log where the library looks when it loads a module, and then
    # compiles all again.
    _build([spec for spec in specs if not spec.is_aot], on_progress)


def _build(specs: list[Any], on_progress: OnProgress) -> None:
    ends_at = time.monotonic() + COMPILE_LIMIT_S
    pool = ThreadPoolExecutor(max(1, len(specs)))
    try:
        waiting = {pool.submit(spec.build, verbose=False) for spec in specs}
        while waiting:
            ended, waiting = wait(waiting, timeout=SIGN_OF_LIFE_S, return_when=FIRST_COMPLETED)
            for future in ended:
                future.result()
            on_progress(len(specs) - len(waiting), len(specs))
            if waiting and time.monotonic() > ends_at:
                raise RuntimeError(f"the compiler did not end within {COMPILE_LIMIT_S:g} s")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class WrapperSet:
    """The wrappers of one step, made when first needed."""

    def __init__(self, library: Library) -> None:
        self.fence = Fence(library.device)
        self._library = library
        self._made: dict[str, list[Any]] = {"prefill": [], "decode": [], "latent": [], "ragged": []}

    def get(self, kind: str, index: int = 0) -> Any:
        """The wrapper number `index` of that kind."""
        made = self._made[kind]
        while len(made) <= index:
            made.append(self._library.make(kind))
        return made[index]


class Library:
    """FlashInfer's classes, a workspace of floats, and sets of wrappers that no step needs any more."""

    def __init__(self, heads: HeadShapes, device: torch.device) -> None:
        self.device = device
        self._heads = heads
        self._module = importlib.import_module("flashinfer")
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._workspaces = [self._floats(self._workspace_bytes())]
        self._idle: deque[WrapperSet] = deque()

    def take(self) -> WrapperSet:
        """A set for one step; the oldest idle one, if its copies have been made or many are idle."""
        if self._idle and (self._idle[0].fence.is_open or len(self._idle) >= MAX_IDLE):
            found = self._idle.popleft()
            found.fence.wait()
            return found
        return WrapperSet(self)

    def give_back(self, wrappers: WrapperSet) -> None:
        """The step is over on the host: what its kernels read is sent, and later copies queue behind them."""
        self._idle.append(wrappers)

    def make(self, kind: str) -> Any:
        """A wrapper for steps of any size."""
        workspace = self._workspaces[-1]
        if kind == "prefill":
            return self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        if kind == "decode":
            on_tensor_cores = self._heads.decodes_on_tensor_cores
            return self._module.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=on_tensor_cores)
        if kind == "latent":
            return self._module.BatchMLAPagedAttentionWrapper(workspace)
        assert kind == "ragged"
        return self._module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")

    def make_captured(self, indptr: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor) -> Any:
        """A decode wrapper whose kernels read these buffers: int32 [R + 1], all blocks, [R] (tokens in the last block,
        or of the whole context for latents)."""
        num_rows = len(lens)
        if self._heads.mla is not None:
            rows = torch.zeros(num_rows + 1, dtype=torch.int32, device=self.device)
            return self._module.BatchMLAPagedAttentionWrapper(
                self._workspaces[-1],
                use_cuda_graph=True,
                qo_indptr=rows,
                kv_indptr=indptr,
                kv_indices=indices,
                kv_len_arr=lens,
            )
        return self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._decode_floats(num_rows),
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=self._heads.decodes_on_tensor_cores,
            paged_kv_indptr_buffer=indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=lens,
        )

    def replan(self, wrapper: Any, *args: Any, **options: Any) -> None:
        """As a captured decode wrapper's `plan`, without copies to its buffers and loops over requests in Python."""
        self._module.fast_decode_plan(wrapper, *args, **options)

    def _workspace_bytes(self) -> int:
        """Most that eager plans ask for: two tiles for each SM, of 128 rows, in fp32 with their sums of exponentials.

        (`PrefillPlan` and `MLAPlan` in FlashInfer's attention/scheduler.cuh.)
        """
        heads = self._heads
        if heads.mla is not None:
            return 2 * self.num_sms * 128 * (heads.mla.kv_lora_rank + 1) * 4
        return 2 * self.num_sms * heads.group * 128 * (heads.head_dim + 1) * 4

    def _decode_floats(self, num_rows: int) -> torch.Tensor:
        """Room for a captured decode of `num_rows` rows, which always splits contexts; the largest is kept and shared.

        (`PrefillSplitQOKVIndptr` with enable_cuda_graph there.)
        """
        heads = self._heads
        tile = 16 if heads.group <= 16 else 64 if heads.group <= 64 else 128
        tiles = max(2 * self.num_sms // heads.num_kv_heads, -(-num_rows * heads.group // tile) + num_rows - 1)
        needed = heads.num_heads * tiles * tile * (heads.head_dim + 1) * 4 + 4096
        if needed > self._workspaces[-1].nbytes:
            self._workspaces.append(self._floats(needed))  # captured graphs may still use the smaller ones
        return self._workspaces[-1]

    def _floats(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(max(num_bytes, 1 << 20) + 4096, dtype=torch.uint8, device=self.device)
