"""Joins this process to its group of ranks through torch.distributed. Knows nothing of requests or models.

Two ways in: spawned by the launcher on one host (a FileStore in a private folder), or under `torchrun` (its
environment). Either way rank 0's launcher address and each host's exchange socket are published in the store.
"""

from __future__ import annotations

import datetime
import os
import tempfile
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore

from hocket.dist.exchange import Hub, Leaf, Recorded, SoloExchange, StepExchange, listen
from hocket.dist.interfaces import interface_to
from hocket.dist.mesh import Mesh
from hocket.dist.record import Record, Records
from hocket.errors import HocketError, RankLost

_NCCL_GRACE_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank this process is and where its peers are. `store_path` None: torchrun's MASTER_ADDR and MASTER_PORT.

    store_fd: the listening socket at which this rank is to serve that store.
    """

    rank: int
    world_size: int
    node: int
    node_ranks: tuple[int, ...]
    store_path: str | None = None
    store_fd: int | None = None

    def device(self, kind: str) -> torch.device:
        """This rank's device of a kind: the GPU with the number that the rank has on its host, or the CPU.

        Raises:
            HocketError: torch finds no such GPU.
        """
        if kind == "cpu":
            return torch.device(kind)
        number, found = self.rank - self.node_ranks[0], torch.cuda.device_count()
        if number >= found:
            raise HocketError(f"rank {self.rank} needs GPU {number} of its host, and torch finds {found}")
        return torch.device(kind, number)

    @classmethod
    def spawned(cls, rank: int, world_size: int, store_path: str) -> Place:
        """A rank that the launcher started; all ranks are on this host."""
        ranks = tuple(range(world_size))
        return cls(rank=rank, world_size=world_size, node=0, node_ranks=ranks, store_path=store_path)

    @classmethod
    def from_torchrun(cls, store_fd: int | None = None) -> Place:
        """Read torchrun's environment: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK."""
        env = os.environ
        rank, local = int(env["RANK"]), int(env.get("LOCAL_RANK", "0"))
        first = rank - local
        local_size = int(env.get("LOCAL_WORLD_SIZE", "1"))
        return cls(
            rank=rank,
            world_size=int(env["WORLD_SIZE"]),
            node=int(env.get("GROUP_RANK", "0")),
            node_ranks=tuple(range(first, first + local_size)),
            store_fd=store_fd,
        )


class World:
    """The group of ranks: first only its store, all of it after `join()`.

    Torch's default group serves start-up alone; the experts and the hosts' exchange have groups of their own.
    """

    def __init__(self, place: Place, timeout_s: float) -> None:
        self.place = place
        if place.store_path is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif len(place.node_ranks) < place.world_size and (interface := interface_to(os.environ["MASTER_ADDR"])):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo would take the one of this host's name
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.store = self._open_store()
        self._ep_groups: dict[tuple[str, float, int | None], dist.ProcessGroup] = {}
        self._num_exchanges = 0
        self.record = Record()
        if place.store_path is not None:
            records = Records(os.path.dirname(place.store_path), place.world_size, create=False)
            self.record = records.own(place.rank)

    def claim(self) -> None:
        """Take this rank's number. Raises RankLost where another process of the group has it."""
        if self.place.store_path is None and self.store.add(f"claimed/{self.place.rank}", 1) > 1:
            raise RankLost(f"rank {self.place.rank} was started twice: RANK must differ between processes")

    def join(self) -> None:
        """Wait for all ranks; raises after the time-out."""
        place = self.place
        if place.world_size == 1:
            return
        try:
            dist.init_process_group(
                "gloo", store=self.store, rank=place.rank, world_size=place.world_size, timeout=self._timeout
            )
        except RuntimeError as error:
            if len(place.node_ranks) == place.world_size:
                raise
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "not set")
            hint = f"is GLOO_SOCKET_IFNAME ({interface}) the interface that the other hosts reach?"
            raise RankLost(f"rank {place.rank} cannot meet all others: {hint} ({error})") from None

    def _open_store(self) -> Store:
        place = self.place
        if place.store_path is not None:
            return FileStore(place.store_path, place.world_size)
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        master = place.rank == 0 and not agent
        store = TCPStore(
            host,
            port,
            is_master=master,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=place.store_fd,
        )
        # Under torchrun the agent's store outlives a restart of the workers: keep each attempt's keys apart.
        return PrefixStore(f"hocket/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def mesh(
        self, *, expert_parallel: bool, device: torch.device, step_timeout_s: float, max_ctas: int | None = None
    ) -> Mesh:
        """This rank's mesh; with `expert_parallel` it has a process group whose collectives fail after the step limit.

        max_ctas: most thread blocks that a collective of that group may take on a GPU; None: as NCCL likes.

        All ranks must call it with the same arguments.
        """
        place = self.place
        group = None
        if expert_parallel and place.world_size > 1:
            key = device.type, step_timeout_s, max_ctas
            if key not in self._ep_groups:
                self._ep_groups[key] = _ep_group(device, step_timeout_s, max_ctas)
            group = self._ep_groups[key]
        return Mesh(
            rank=place.rank,
            world_size=place.world_size,
            device=device,
            node_ranks=place.node_ranks,
            ep_group=group,
            record=self.record,
        )

    def exchange(self, *, lock_step: bool, timeout_s: float, connect_timeout_s: float) -> StepExchange:
        """The step exchange of this rank; without `lock_step` ranks are replicas and it stays alone."""
        self.record.restart()
        found = self._exchange(lock_step=lock_step, timeout_s=timeout_s, connect_timeout_s=connect_timeout_s)
        return Recorded(found, self.record)

    def _exchange(self, *, lock_step: bool, timeout_s: float, connect_timeout_s: float) -> StepExchange:
        place = self.place
        if not lock_step or place.world_size == 1:
            return SoloExchange()
        self._num_exchanges += 1
        key = f"exchange/{self._num_exchanges}/{place.node}"
        first = place.node_ranks[0]
        gather = self._leader_gather(timeout_s) if len(place.node_ranks) < place.world_size else None
        if place.rank != first:
            path = self.store.get(key).decode()
            return Leaf(path, place.rank, first, connect_timeout_s, timeout_s)
        own_folder = None if place.store_path else tempfile.TemporaryDirectory(prefix="hocket-")
        folder = os.path.dirname(place.store_path) if place.store_path else own_folder.name  # type: ignore[union-attr]
        path = os.path.join(folder, f"exchange-{self._num_exchanges}")
        hub = Hub(listen(path), list(place.node_ranks), timeout_s, gather)
        self.store.set(key, path)
        try:
            hub.accept(connect_timeout_s)
        finally:
            if own_folder is not None:  # all are connected: nothing may be left if this process is killed
                own_folder.cleanup()
        return hub

    def _leader_gather(self, timeout_s: float) -> _LeaderGather | None:
        """Collective over all ranks: a gloo group of each host's first rank."""
        gathered = [torch.empty(1, dtype=torch.int64) for _ in range(self.place.world_size)]
        dist.all_gather(gathered, torch.tensor([self.place.node_ranks[0]]))
        firsts = [int(first) for first in gathered]
        leaders = sorted(set(firsts))
        sizes = [firsts.count(leader) for leader in leaders]
        group = dist.new_group(leaders, backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        return _LeaderGather(group, sizes) if self.place.rank in leaders else None

    def close(self) -> None:
        """Leave the group; every collective must be over."""
        if self.place.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _ep_group(device: torch.device, timeout_s: float, max_ctas: int | None) -> dist.ProcessGroup:
    """A new group of all ranks."""
    if device.type == "cpu":
        found: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        return found
    options = dist.ProcessGroupNCCL.Options()
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    # NCCL's own watchdog aborts the process without a word: the rank's, which names ranks, comes first.
    timeout = datetime.timedelta(seconds=timeout_s + _NCCL_GRACE_S)
    made: dist.ProcessGroup = dist.new_group(backend="nccl", timeout=timeout, pg_options=options)
    return made


class _LeaderGather:
    """Gathers the hosts' columns, in host order, over gloo. Hosts may have different numbers of ranks."""

    def __init__(self, group: dist.ProcessGroup, node_sizes: list[int]) -> None:
        self._group = group
        self._node_sizes = node_sizes

    def __call__(self, raw: bytes) -> list[bytes]:
        me = dist.get_rank(self._group)
        column_bytes = len(raw) // self._node_sizes[me]
        most = max(self._node_sizes) * column_bytes
        mine = torch.zeros(most, dtype=torch.uint8)
        mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        gathered = [torch.empty(most, dtype=torch.uint8) for _ in self._node_sizes]
        try:
            dist.all_gather(gathered, mine, group=self._group)
        except RuntimeError as error:
            raise RankLost(f"the step exchange between hosts failed on host {me} of {len(gathered)}: {error}") from None
        return [bytes(t[: n * column_bytes].numpy()) for t, n in zip(gathered, self._node_sizes, strict=True)]
