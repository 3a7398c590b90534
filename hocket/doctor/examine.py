"""Puts the probes' findings together, and says what keeps Hocket from running. Prints nothing; torch-free."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import msgspec

from hocket import __version__
from hocket.config.devices import num_gpus
from hocket.config.engine import EngineConfig
from hocket.config.kernel_caches import kernel_caches
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.doctor import children
from hocket.doctor.host import REQUIRED, driver_version, packages, processors
from hocket.errors import HocketError

SURVEY, LINKS, PEERS = (f"hocket.doctor.{name}" for name in ("survey", "links", "peers"))
MIN_LINK_RANKS = 2
_IMPORT_LIMITS = 3
"""The first process of torch after a start of the machine reads gigabytes: it gets so many limits."""
_NO_SURVEY: dict[str, Any] = {"versions": {}, "memory_bytes": None, "gpus": [], "backends": [], "choice": None}
OnProgress = Callable[[str], None]


def examine(options: Options, *, links: bool, limit_s: float, on_progress: OnProgress) -> dict[str, Any]:
    """Everything there is to say, as plain values; `problems` is empty where all is there that is needed.

    links: whether to measure them. limit_s: for each part of the measurement; what takes longer is ended and named.

    Raises:
        ConfigError, CheckpointError: as resolving the options does.
    """
    installed = packages()
    missing = [name for name in REQUIRED if installed[name] is None]
    report: dict[str, Any] = {
        "hocket": __version__,
        "python": platform.python_version(),
        "packages": installed,
        "driver": driver_version(),
        "kernel_caches": {name: str(folder) for name, folder in kernel_caches().items()},
        "cpu": processors(),
        "config": None,
        **_NO_SURVEY,
        "links": None,
        "problems": [f"{name} is not installed" for name in missing],
    }
    if missing:  # nothing could be asked: resolving, too, wants to know about torch
        return report
    config = resolve(options)
    report["config"] = {"model": options.model} | _resolved(config)
    report |= _survey(config, limit_s, on_progress, report["problems"])
    if links and report["choice"] is not None:  # else torch or its GPUs failed, and links would as well
        report["links"] = _links(config.device, limit_s, on_progress, report["problems"])
    report["problems"] += _tokenizer_problems(options, config)
    return report


def _resolved(config: EngineConfig) -> dict[str, Any]:
    """What `auto` became, as far as it needs no torch."""
    parallel, overlap = config.parallel, config.overlap
    return {
        "path": config.model_path,
        "model_type": config.model.model_type,
        "device": config.device,
        "dtype": config.dtype,
        "ranks": parallel.data_parallel_size,
        "experts_over": parallel.expert_parallel_size,
        "transport": parallel.all2all_backend,
        "num_ubatches": overlap.num_ubatches,
        "executor": overlap.executor if overlap.num_ubatches > 1 else None,
        "graph_sizes": list(config.graphs.sizes),
        "split_graph_sizes": list(config.graphs.split_sizes),
        "block_size": config.cache.block_size,
        "max_model_len": config.scheduler.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
    }


def _survey(config: EngineConfig, limit_s: float, on_progress: OnProgress, problems: list[str]) -> dict[str, Any]:
    on_progress("asking torch")
    arguments = {"config": msgspec.json.encode(config).decode()}
    outcomes = children.run(SURVEY, arguments, limit_s=limit_s * _IMPORT_LIMITS, on_progress=on_progress)
    found = dict(_NO_SURVEY)
    for part in outcomes[0].found:
        found |= part
    problems += children.problems("torch", outcomes)
    if config.device == "cuda" and outcomes[0].error is None and len(found["gpus"]) < num_gpus():
        problems.append(f"torch finds {len(found['gpus'])} of the {num_gpus()} GPUs of this host")
    choice = found["choice"]
    if choice is not None:
        problems += choice["problems"]
    return found


def _links(device: str, limit_s: float, on_progress: OnProgress, problems: list[str]) -> dict[str, Any]:
    """{ranks, kind, collectives, copies}: what was measured before anything went wrong."""
    ranks = num_gpus() if device == "cuda" else MIN_LINK_RANKS
    found: dict[str, Any] = {"ranks": ranks, "kind": "gloo", "collectives": [], "copies": []}
    if ranks < MIN_LINK_RANKS:
        return found | {"kind": "none"}

    def measured(module: str, count: int, what: str) -> list[Any]:
        arguments = {"device": device, "limit_s": limit_s}
        outcomes = children.run(module, arguments, count=count, limit_s=limit_s, on_progress=on_progress)
        problems.extend(children.problems(what, outcomes))
        return outcomes[0].found

    if device == "cuda":
        found["kind"] = "nccl"
        found["copies"] = measured(PEERS, 1, "copies between GPUs")
    found["collectives"] = measured(LINKS, ranks, f"transfers between ranks ({found['kind']})")
    return found


def _tokenizer_problems(options: Options, config: EngineConfig) -> list[str]:
    if options.skip_tokenizer_init:
        return []
    from hocket.tokenizer.tokenizer import Tokenizer  # only now is it known that its library is there

    try:
        Tokenizer.from_pretrained(options.tokenizer or config.model_path)
    except HocketError as error:
        return [str(error)]
    return []
