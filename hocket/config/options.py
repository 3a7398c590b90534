"""Everything a user can set, once: the command line, `LLM(...)` and YAML files all read this table.

Names and defaults are those users of vLLM know. Knows how to check single values; what depends on several
values or on the model is checked in `resolve.py`.
"""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from hocket.config.backends import ATTENTION, EP_TRANSPORTS, EXECUTORS, EXPERTS, PLACEMENTS
from hocket.config.devices import DEVICES
from hocket.config.harmless import without_harmless
from hocket.errors import ConfigError

MAX_TOKENS = 2**31 - 1
"""Most tokens, requests or ranks that an option may name: counts are held in int32 tensors."""
MAX_SECONDS = 86400
MAX_NCCL_CTAS = 64
DTYPE_NAMES = {"half": "float16", "float": "float32"}
LOAD_FORMATS = {"safetensors": "auto"}


def _option(
    default: Any,
    *,
    help: str,
    group: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """One option: its help line, the group `--help` shows it under, and what values are allowed."""
    return field(
        default=default,
        metadata={"help": help, "group": group, "choices": choices, "least": least, "most": most},
    )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The user's options as given, None meaning "not given"; "auto" is turned into a value by `resolve()`.

    `model`, `tokenizer` and `chat_template` may be paths, `dtype` a torch.dtype or one of its shorter names.
    """

    model: str = _option("tiny", help="a Hugging Face model folder, or the one that ships with Hocket", group="Model")
    tokenizer: str | None = _option(None, help="folder of the tokenizer, if not the model's", group="Model")
    chat_template: str | None = _option(None, help="chat template: a file or the template itself", group="Model")
    skip_tokenizer_init: bool = _option(False, help="no tokenizer: token ids in, token ids out", group="Model")
    dtype: str = _option(
        "auto",
        help="of weights and activations; auto: float32 on a CPU, else the checkpoint's",
        group="Model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    seed: int = _option(0, help="for requests that bring no seed of their own", group="Model", least=0, most=2**63 - 1)
    load_format: str = _option(
        "auto", help="dummy: random weights (for benchmarks)", group="Model", choices=("auto", "dummy")
    )
    max_model_len: int | None = _option(
        None, help="longest prompt plus output, in tokens", group="Model", least=2, most=MAX_TOKENS
    )
    trust_remote_code: bool = _option(False, help="accepted for compatibility: no model code is run", group="Model")

    data_parallel_size: int = _option(
        1, help="ranks, each with its own attention", group="Parallel", least=1, most=4096
    )
    enable_expert_parallel: bool = _option(
        False, help="spread the experts over the ranks (else each rank has all)", group="Parallel"
    )
    tensor_parallel_size: int = _option(1, help="only 1 is supported", group="Parallel", least=1)
    pipeline_parallel_size: int = _option(1, help="only 1 is supported", group="Parallel", least=1)
    all2all_backend: str = _option(
        "auto",
        help="how tokens reach the ranks of their experts",
        group="Parallel",
        choices=("auto", *EP_TRANSPORTS),
    )
    expert_placement_strategy: str = _option(
        "linear", help="which rank holds which experts", group="Parallel", choices=PLACEMENTS
    )
    max_nccl_ctas: int | None = _option(
        None,
        help="most thread blocks of a GPU, each on a multiprocessor, that NCCL may take to move tokens (default: with "
        "overlap what HOCKET_DBO_COMM_SMS leaves to transfers, else NCCL decides)",
        group="Parallel",
        least=1,
        most=MAX_NCCL_CTAS,
    )

    enable_dbo: bool = _option(
        False,
        help="dual batch overlap: split a step in two ubatches, one computes while the other communicates; needs "
        "--data-parallel-size over 1 and --enable-expert-parallel. Both halves read every weight, so it pays in large "
        "steps (prefill, many decodes) over slow links: see hocket bench overlap",
        group="Overlap",
    )
    ubatch_size: int = _option(
        0,
        help="over 1: overlap with so many ubatches (0: two with --enable-dbo); more hide more and cost more",
        group="Overlap",
        least=0,
        most=64,
    )
    dbo_decode_token_threshold: int = _option(
        32,
        help="split a step of decodes (one token per request) only if every rank that works has so many; below, the "
        "halves cost more than they hide. At least the number of ubatches",
        group="Overlap",
        least=1,
        most=MAX_TOKENS,
    )
    dbo_prefill_token_threshold: int = _option(
        512,
        help="the same for steps with prompt tokens on any rank; a step in which one rank has fewer is not split",
        group="Overlap",
        least=1,
        most=MAX_TOKENS,
    )
    ubatch_cut: str = _option(
        "equal",
        help="where a step is split: at equal numbers of tokens, or at equal estimated cost, attention to the context "
        "included (pays where contexts are long or differ much, as in mixed steps); CUDA graphs: at equal numbers",
        group="Overlap",
        choices=("equal", "cost"),
    )
    ubatch_executor: str = _option(
        "auto",
        help="how ubatches take turns; auto: the cheaper one by hocket bench handover, greenlets",
        group="Overlap",
        choices=("auto", *EXECUTORS),
    )
    split_graphs: bool = _option(
        True,
        help="capture decode steps as ubatches too, from the threshold on; without, decodes that have a CUDA graph run "
        "whole (no_split_graph)",
        group="Overlap",
    )
    emulate_link_gb_per_s: float | None = _option(
        None,
        help="stretch transfers to a link of this bandwidth (for demonstrations)",
        group="Overlap",
        least=1e-6,
        most=1e9,
    )
    emulate_link_latency_us: float = _option(
        0.0, help="and of this latency, with --emulate-link-gb-per-s", group="Overlap", least=0, most=1e9
    )
    emulate_link_token_bytes: str | None = _option(
        None,
        help="and as if each token took so many bytes out and back, as 29568,57344 (default: what is sent)",
        group="Overlap",
    )

    max_num_seqs: int | None = _option(
        None, help="most requests running at once on a rank (default: 256)", group="Scheduler", least=1, most=MAX_TOKENS
    )
    max_num_batched_tokens: int | None = _option(
        None, help="most tokens of a rank's step", group="Scheduler", least=1, most=MAX_TOKENS
    )
    enable_chunked_prefill: bool = _option(True, help="let a step compute a part of a prompt", group="Scheduler")
    long_prefill_token_threshold: int = _option(
        0, help="most prompt tokens of one request in a step (0: no limit)", group="Scheduler", least=0, most=MAX_TOKENS
    )
    prefill_interval: int = _option(
        1,
        help="while requests decode, compute prompts only every so many steps",
        group="Scheduler",
        least=1,
        most=MAX_TOKENS,
    )
    async_scheduling: bool | None = _option(
        None,
        help="schedule a step while the one before still runs (default: on GPUs, where it keeps them busy)",
        group="Scheduler",
    )

    block_size: int | None = _option(
        None,
        help="tokens in a block of the KV cache, and the unit in which prefixes are kept (default: 16; 64 for latent "
        "attention on GPUs, whose kernels read so many at once)",
        group="KV cache",
        least=1,
        most=1024,
    )
    kv_cache_dtype: str = _option(
        "auto",
        help="of the KV cache; only the model's own dtype, which auto is, can be had",
        group="KV cache",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    enable_prefix_caching: bool = _option(True, help="keep and re-use the KV of common prefixes", group="KV cache")
    gpu_memory_utilization: float = _option(
        0.9, help="share of the free memory that the KV cache may use", group="KV cache", least=0.01, most=1.0
    )
    kv_cache_memory_bytes: int | None = _option(
        None,
        help="size of each rank's KV cache, instead of a share of the memory",
        group="KV cache",
        least=1,
        most=2**63 - 1,
    )

    device: str = _option(
        "auto",
        help="where to run; auto: on the GPUs where there are any, one for each rank",
        group="Backends",
        choices=("auto", *DEVICES),
    )
    attention_backend: str = _option("auto", help="attention kernels", group="Backends", choices=("auto", *ATTENTION))
    moe_backend: str = _option("auto", help="expert kernels", group="Backends", choices=("auto", *EXPERTS))
    deterministic: bool = _option(
        False,
        help="bit-equal tokens and log-probabilities whatever shares the batch and however it is cut, for one number "
        "of ranks and one placement of the experts; slower",
        group="Backends",
    )
    enforce_eager: bool = _option(False, help="never capture CUDA graphs (on a CPU there are none)", group="Backends")
    cudagraph_capture_sizes: str | None = _option(
        None,
        help="numbers of decoding requests to capture a CUDA graph for, as 1,2,4,8 (default: a rule up to 512)",
        group="Backends",
    )
    max_cudagraph_capture_size: int | None = _option(
        None, help="largest of these (default: --max-num-seqs, at most 512)", group="Backends", least=1, most=MAX_TOKENS
    )
    startup_timeout: float = _option(
        120.0, help="seconds for all ranks to be ready", group="Limits", least=1, most=MAX_SECONDS
    )
    capture_timeout: float = _option(
        60.0,
        help="seconds that capturing one CUDA graph may take, compiling included",
        group="Limits",
        least=1,
        most=MAX_SECONDS,
    )
    step_timeout: float = _option(
        30.0,
        help="seconds a rank may compute, or wait for another, without getting on before the group ends",
        group="Limits",
        least=0.1,
        most=MAX_SECONDS,
    )

    def __post_init__(self) -> None:
        for option in fields(self):
            object.__setattr__(self, option.name, _taken(option, getattr(self, option.name)))

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Options:
        """Build from keyword arguments or a YAML mapping; dashes and underscores are the same.

        One warning names the options of vLLM that are accepted without effect.

        Raises:
            ConfigError: an unknown name (with the nearest known ones), or a value that is not allowed.
        """
        values = without_harmless({str(key).replace("-", "_"): value for key, value in given.items()})
        known = [option.name for option in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
                hint = " or ".join(near) if near else "the options that --help lists"
                raise ConfigError(name, values[name], hint, where="because there is no such option")
        return cls(**values)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Options from a YAML file: a mapping of option names to values."""
    try:
        value = msgspec.yaml.decode(Path(path).expanduser().read_bytes())
    except (OSError, ValueError) as error:  # msgspec's DecodeError is a ValueError, as a wrong encoding is
        raise ConfigError("config", str(path), f"a readable YAML file ({error})") from None
    if value is None:  # an empty file
        return {}
    if not isinstance(value, dict):
        raise ConfigError("config", str(path), "a YAML mapping of option names to values")
    return {str(key).replace("-", "_"): item for key, item in value.items()}


@functools.cache
def _hints() -> dict[str, Any]:
    """Types of all options by name; evaluating them takes milliseconds."""
    return typing.get_type_hints(Options)


def option_type(option: Field[Any]) -> tuple[type, bool]:
    """The plain type of an option and whether it may be None."""
    hint = _hints()[option.name]
    if isinstance(hint, types.UnionType):
        inner = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        return inner, True
    return hint, False


def _taken(option: Field[Any], given: Any) -> Any:
    """The value to keep for an option, of its plain type."""
    if given is None:
        return option.default
    kind, _ = option_type(option)
    value = _plain(option.name, kind, given)
    meta = option.metadata
    if value is None or (meta["choices"] and value not in meta["choices"]):
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(option.name, given, ", ".join(meta["choices"]) or names[kind])
    low, high = meta["least"], meta["most"]
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        allowed = f"from {low} to {high}" if high is not None and low is not None else f"at least {low}"
        raise ConfigError(option.name, given, allowed)
    return value


def _plain(name: str, kind: type, given: Any) -> Any:
    """`given` as the plain type `kind`, None if it is something else."""
    if kind is str:
        if isinstance(given, os.PathLike) and name in ("model", "tokenizer", "chat_template"):
            path = os.fsdecode(given)  # a path with a separator, so that it is never taken for a model's name
            return path if os.path.dirname(path) else os.path.join(os.curdir, path)
        text = str(given).removeprefix("torch.") if name == "dtype" else given
        text = LOAD_FORMATS.get(text, text) if name == "load_format" and isinstance(text, str) else text
        return DTYPE_NAMES.get(text, text) if isinstance(text, str) else None
    if kind is bool:
        return given if isinstance(given, bool) else None
    if isinstance(given, bool) or not isinstance(given, numbers.Real if kind is float else numbers.Integral):
        return None
    try:
        return kind(given)
    except OverflowError:
        return math.inf
