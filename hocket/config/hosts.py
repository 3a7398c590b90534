"""Which ranks each of several hosts runs, and where they find the server. Knows nothing of sockets or processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hocket.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29550
_NOT_GIVEN = "not to give it"


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """One host of several. The first one's server has rank 0; the others are "headless", with ranks alone, or, with
    `own_server`, each has a server for its own ranks, and somebody else balances over the servers.

    world_size: ranks of all hosts. start_rank, num_ranks: this host's. address, port: where the host of rank 0 listens
    for the others. Raises ConfigError, in terms of the flags of `hocket serve`, for what cannot be.
    """

    world_size: int
    num_ranks: int
    start_rank: int = 0
    address: str = DEFAULT_ADDRESS
    port: int = DEFAULT_PORT
    headless: bool = False
    own_server: bool = False

    def __post_init__(self) -> None:
        size, first = self.world_size, self.start_rank
        if not 1 <= self.num_ranks < size:
            allowed = f"1 to {size - 1}, so that other hosts have some of the {size} ranks"
            if size < 2:
                allowed = "not to give it with --data-parallel-size 1"
            raise ConfigError("data_parallel_size_local", self.num_ranks, allowed)
        if self.headless and self.own_server:
            where = "with a server on every host (external or hybrid balancing)"
            raise ConfigError("headless", True, _NOT_GIVEN, where=where)
        if not self.headless and not self.own_server and first != 0:
            allowed = "0, or with --headless, or a server on every host (--data-parallel-hybrid-lb)"
            raise ConfigError("data_parallel_start_rank", first, allowed, where="on the server's host")
        least = 1 if self.headless else 0
        if not least <= first <= size - self.num_ranks:
            allowed = f"{least} to {size - self.num_ranks} with {self.num_ranks} of {size} ranks here"
            where = "with --headless" if self.headless else ""
            raise ConfigError("data_parallel_start_rank", first, allowed, where=where)

    @classmethod
    def from_flags(
        cls,
        world_size: int,
        *,
        size_local: int | None,
        start_rank: int | None,
        address: str | None,
        port: int | None,
        headless: bool,
        rank: int | None = None,
        external_lb: bool = False,
        hybrid_lb: bool = False,
    ) -> HostConfig | None:
        """What the flags ask for; None: all ranks are on this host.

        Raises:
            ConfigError: they contradict each other.
        """
        is_external = external_lb or rank is not None
        if is_external:
            if hybrid_lb:
                raise ConfigError("data_parallel_hybrid_lb", True, _NOT_GIVEN, where="with external balancing")
            size_local, start_rank = _external(world_size, rank, size_local, start_rank)
        given = (size_local, start_rank, address, port)
        if given == (None, None, None, None) and not headless and not hybrid_lb:
            return None
        needed: dict[str, int | str | None] = {
            "data_parallel_size_local": size_local,
            "data_parallel_start_rank": start_rank,
        }
        if headless:
            _need(needed | {"data_parallel_address": address}, "with --headless")
        elif hybrid_lb:
            _need(needed, "with --data-parallel-hybrid-lb")
        if size_local == world_size and not headless and not start_rank and not is_external:
            return None
        _need({"data_parallel_size_local": size_local}, "on many hosts")
        return cls(
            world_size=world_size,
            num_ranks=size_local or 0,
            start_rank=start_rank or 0,
            address=address or DEFAULT_ADDRESS,
            port=port or DEFAULT_PORT,
            headless=headless,
            own_server=is_external or hybrid_lb,
        )

    @property
    def ranks(self) -> range:
        """This host's."""
        return range(self.start_rank, self.start_rank + self.num_ranks)

    @property
    def is_first(self) -> bool:
        """Whether the others meet here."""
        return self.start_rank == 0


_NEEDED = {
    "data_parallel_size_local": "the number of ranks on this host",
    "data_parallel_start_rank": "the first rank of this host",
    "data_parallel_address": "the name or address of the server's host",
}


def _need(given: Mapping[str, int | str | None], where: str) -> None:
    for name, value in given.items():
        if value is None:
            raise ConfigError(name, None, _NEEDED[name], where=where)


def _external(world_size: int, rank: int | None, size_local: int | None, start_rank: int | None) -> tuple[int, int]:
    """Number of ranks and first rank of a server with one rank."""
    where = "with external balancing"
    if world_size < 2:
        raise ConfigError("data_parallel_size", world_size, "2 or more", where=where)
    if rank is None or not 0 <= rank < world_size:
        allowed = f"0 to {world_size - 1}: the one rank of this server"
        raise ConfigError("data_parallel_rank", rank, allowed, where=where)
    if size_local not in (None, 1):
        allowed = "1 (for more ranks behind one server: --data-parallel-hybrid-lb)"
        raise ConfigError("data_parallel_size_local", size_local, allowed, where=where)
    if start_rank not in (None, rank):
        raise ConfigError("data_parallel_start_rank", start_rank, _NOT_GIVEN, where=where)
    return 1, rank
