"""A probe: what torch finds on this host, which backends run, and what a configuration would come to. Moves no data."""

from __future__ import annotations

import importlib
from typing import Any

import msgspec
import torch

from hocket.config.engine import EngineConfig
from hocket.doctor.backends import backends
from hocket.doctor.child import Task, described
from hocket.doctor.choice import choice
from hocket.worker.memory import available_bytes


def probe(task: Task) -> None:
    """Reports, in parts: versions, memory_bytes, backends, gpus, choice. arguments: the engine's config as JSON."""
    task.found({"versions": versions()})
    task.at("importing the engine")
    importlib.import_module("hocket.rank")
    task.found({"memory_bytes": available_bytes(torch.device("cpu"))})
    config = msgspec.json.decode(task.arguments["config"], type=EngineConfig)
    task.at("looking at backends")
    task.found({"backends": backends(config)})
    free_bytes = None
    if config.device == "cuda":
        task.at("starting CUDA")
        found = gpus()
        task.found({"gpus": found})
        used = found[: config.parallel.data_parallel_size]
        free_bytes = min((gpu["free_bytes"] for gpu in used), default=0)
    task.at("building the model without weights")
    try:
        task.found({"choice": choice(config, free_bytes)})
    except Exception as error:  # what the engine would fail with
        task.found({"choice": {"problems": [f"the engine cannot be built: {described(error)}"]}})


def versions() -> dict[str, str | None]:
    """Of what torch brings along, None where it does not have it."""
    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl)) or None,
    }


def gpus() -> list[dict[str, Any]]:
    """Each GPU that torch sees, in CUDA's order."""
    found = []
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        found.append(
            {
                "name": facts.name,
                "memory_bytes": facts.total_memory,
                "free_bytes": available_bytes(torch.device("cuda", number)),
                "num_sms": facts.multi_processor_count,
                "compute_capability": f"{facts.major}.{facts.minor}",
            }
        )
    return found
