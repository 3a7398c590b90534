"""vLLM's options that are not ours: those that change no answer here are accepted, so that its commands and files run,
and named once; those for what is not done here are refused with the reason.

Knows nothing of Hocket's own options.
"""

from __future__ import annotations

import logging
from typing import Any

from hocket.errors import ConfigError

logger = logging.getLogger(__name__)

HARMLESS: dict[str, tuple[Any, ...] | None] = {
    "calculate_kv_scales": (False,),
    "code_revision": None,
    "compilation_config": None,
    "config_format": ("auto", "hf"),
    "cpu_offload_gb": (0,),
    "disable_cascade_attn": None,
    "disable_custom_all_reduce": None,
    "disable_log_requests": None,
    "disable_log_stats": None,
    "distributed_executor_backend": ("mp",),
    "download_dir": None,
    "enable_lora": (False,),
    "enable_sleep_mode": (False,),
    "generation_config": ("auto",),
    "hf_overrides": (),
    "hf_token": None,
    "limit_mm_per_prompt": None,
    "max_logprobs": None,
    "max_parallel_loading_workers": None,
    "max_seq_len_to_capture": None,
    "quantization": (),
    "revision": None,
    "runner": ("auto", "generate"),
    "served_model_name": None,
    "speculative_config": (),
    "swap_space": None,
    "task": ("auto", "generate"),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": None,
}
"""vLLM's options that change no answer here, with the values for which that holds (None: all); None always is one."""

_SERVERS = "hocket serve has it on the command line: it says what one server of several does"
_BOTH_ROLES = "every rank computes prompts and answers: there are no prefill and decode roles"
REFUSED = {
    "data_parallel_external_lb": _SERVERS,
    "data_parallel_hybrid_lb": _SERVERS,
    "data_parallel_rank": _SERVERS,
    "kv_transfer_config": _BOTH_ROLES,
    "disaggregation_mode": _BOTH_ROLES,
}
"""Why an option is not there."""


def without_harmless(values: dict[str, Any]) -> dict[str, Any]:
    """`values` less those of HARMLESS, which one warning names, and REFUSED, which raise ConfigError where they ask for
    something."""
    kept, ignored = {}, []
    for name, value in values.items():
        if name in REFUSED and value is not None and value is not False:
            raise ConfigError(name, value, "not to give it", where=f"({REFUSED[name]})")
        if name in REFUSED:
            continue
        if name not in HARMLESS:
            kept[name] = value
            continue
        harmless = HARMLESS[name]
        if value is not None and harmless is not None and value not in harmless:
            raise ConfigError(name, value, f"{', '.join(map(str, (None, *harmless)))} (Hocket does not do this)")
        ignored.append(name)
    if ignored:
        logger.warning("options without effect here: %s", ", ".join(ignored))
    return kept
