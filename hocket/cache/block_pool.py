"""Who owns which KV block, and which unowned ones still hold something worth finding. Knows no requests or tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks 0 … num_blocks - 1.

    A block is *owned* (count > 0) or *free*. A free block is *blank*, or *kept*: its content has a name and can be
    found again. Blank blocks are given out first, then the least recently released kept one, which loses its name.
    Names are unique: when two blocks hold the same content, only the first has the name.
    """

    __slots__ = ("_blank", "_block_of", "_kept", "_name_of", "_ref_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts: list[int] = [0] * num_blocks
        self._name_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank: list[int] = list(range(num_blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give out: blank and kept."""
        return len(self._blank) + len(self._kept)

    @property
    def num_named(self) -> int:
        """Blocks, owned or kept, that `find` can return."""
        return len(self._block_of)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each owned once, without name. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks taken, {self.num_free} free"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._blank:
            block_id = self._blank.pop()
        else:
            block_id, _ = self._kept.popitem(last=False)
            self._unname(block_id)
        self._ref_counts[block_id] = 1
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """One more owner for each block; they are owned or kept now."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._kept[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """One owner less for each block of a sequence. Later blocks are evicted first: a prefix outlives its suffix."""
        for block_id in reversed(block_ids):
            count = self._ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} was released more often than taken"
            self._ref_counts[block_id] = count
            if count == 0:
                if self._name_of[block_id] is None:
                    self._blank.append(block_id)
                else:
                    self._kept[block_id] = None

    def find(self, name: bytes) -> int | None:
        return self._block_of.get(name)

    def name(self, block_id: int, name: bytes) -> None:
        """Names the content of an owned block; does nothing if the block has a name or the name a block."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} was named without an owner"
        if self._name_of[block_id] is None and name not in self._block_of:
            self._name_of[block_id] = name
            self._block_of[name] = block_id

    def forget(self, name: bytes) -> None:
        """No block is found under `name` any more; owners keep the block."""
        block_id = self._block_of.get(name)
        if block_id is None:
            return
        self._unname(block_id)
        if self._ref_counts[block_id] == 0:
            del self._kept[block_id]
            self._blank.append(block_id)

    def forget_all(self) -> None:
        for name in list(self._block_of):
            self.forget(name)

    def _unname(self, block_id: int) -> None:
        name = self._name_of[block_id]
        assert name is not None
        self._name_of[block_id] = None
        del self._block_of[name]
