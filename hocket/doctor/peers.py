"""A probe: copies between each two GPUs of this host, timed and checked. Knows no ranks."""

from __future__ import annotations

import itertools

import torch

from hocket.doctor.child import Task
from hocket.doctor.host import links_between_gpus
from hocket.doctor.links import SIZES, figures, timed
from hocket.errors import HocketError


def probe(task: Task) -> None:
    """For each two GPUs and size {from, to, link, peer_access, bytes, us, gb_per_s}.

    link: as `host.links_between_gpus` names it, None where it cannot be told. peer_access: whether one reads the
    other's memory; without it copies go through the host.
    """
    count = torch.cuda.device_count()
    uuids = [f"GPU-{torch.cuda.get_device_properties(number).uuid}" for number in range(count)]
    links = links_between_gpus()
    for source, target in itertools.permutations(range(count), 2):
        for num_bytes in SIZES["cuda"]:
            task.at(f"copying {num_bytes >> 10:,} KiB from GPU {source} to GPU {target}")
            task.found(
                {
                    "from": source,
                    "to": target,
                    "link": links.get(uuids[source], {}).get(uuids[target]),
                    "peer_access": torch.cuda.can_device_access_peer(source, target),
                }
                | figures(num_bytes, _copied(num_bytes, source, target))
            )


def _copied(num_bytes: int, source: int, target: int) -> list[float]:
    """µs of each repeat."""
    sent, wanted = (torch.arange(num_bytes // 4, dtype=torch.int32, device=gpu) for gpu in (source, target))
    got = torch.empty_like(wanted)
    torch.cuda.synchronize(source)
    us = timed(lambda: got.copy_(sent, non_blocking=True), num_bytes, got.device)
    if not torch.equal(got, wanted):
        raise HocketError(f"wrong numbers arrived at GPU {target} from GPU {source}")
    return us
