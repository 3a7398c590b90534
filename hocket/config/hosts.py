"""Which ranks each of several hosts runs, and where they find the server. Knows nothing of sockets or processes."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.errors import ConfigError

DEFAULT_ADDRESS = "127.0.0.1"
DEFAULT_PORT = 29550


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """One host of several. The server's host has rank 0; the others, "headless", have ranks alone.

    world_size: ranks of all hosts. start_rank, num_ranks: this host's. address, port: where the server's host listens
    for the others. Raises ConfigError, in terms of the flags of `hocket serve`, for what cannot be.
    """

    world_size: int
    num_ranks: int
    start_rank: int = 0
    address: str = DEFAULT_ADDRESS
    port: int = DEFAULT_PORT
    headless: bool = False

    def __post_init__(self) -> None:
        size, first = self.world_size, self.start_rank
        if not 1 <= self.num_ranks < size:
            allowed = f"1 to {size - 1}, so that other hosts have some of the {size} ranks"
            if size < 2:
                allowed = "not to give it with --data-parallel-size 1"
            raise ConfigError("data_parallel_size_local", self.num_ranks, allowed)
        if not self.headless and first != 0:
            raise ConfigError("data_parallel_start_rank", first, "0, or with --headless", where="on the server's host")
        if self.headless and not 1 <= first <= size - self.num_ranks:
            allowed = f"1 to {size - self.num_ranks} with {self.num_ranks} of {size} ranks here"
            raise ConfigError("data_parallel_start_rank", first, allowed, where="with --headless")

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
    ) -> HostConfig | None:
        """What the flags ask for; None: all ranks are on this host.

        Raises:
            ConfigError: they contradict each other.
        """
        if size_local is None and not headless and start_rank is None and address is None and port is None:
            return None
        if headless:
            given = {"data_parallel_size_local": size_local, "data_parallel_start_rank": start_rank}
            for name, value in (given | {"data_parallel_address": address}).items():
                if value is None:
                    raise ConfigError(name, None, "a value", where="with --headless")
        if size_local == world_size and not headless and not start_rank:
            return None
        if size_local is None:
            raise ConfigError(
                "data_parallel_size_local", None, "the number of ranks on this host", where="on many hosts"
            )
        return cls(
            world_size=world_size,
            num_ranks=size_local,
            start_rank=start_rank or 0,
            address=address or DEFAULT_ADDRESS,
            port=port or DEFAULT_PORT,
            headless=headless,
        )

    @property
    def ranks(self) -> range:
        """This host's."""
        return range(self.start_rank, self.start_rank + self.num_ranks)
