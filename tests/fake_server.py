"""The whole server over ranks without a model (`fake_ranks`), on a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fake_ranks import FakeGroup
from served import Served

from hocket.config.options import Options
from hocket.llm import LLM
from hocket.server.settings import Settings


class FakeServed(Served):
    """Its ranks answer every prompt with `text` (or `token_ids`), token by token."""

    def __init__(self, options: Options, settings: Settings) -> None:
        self.group = FakeGroup(lambda request: self.token_ids)
        self.token_ids: list[int] = []
        group: Any = self.group
        super().__init__(LLM.from_options(options, group=group), settings)

    def is_idle(self) -> bool:
        return super().is_idle() and not self.group._running

    @property
    def text(self) -> str:
        return self.llm.get_tokenizer().decode(self.token_ids)

    @text.setter
    def text(self, text: str) -> None:
        self.token_ids = self.llm.get_tokenizer().encode(text, add_special_tokens=False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ranks stand still, but for `group.step`."""
        self.group.paused = True
        try:
            yield
        finally:
            self.group.paused = False
            self.on_loop(self.model.client._pump)

    def step(self, ranks: Sequence[int] | None = None) -> None:
        """One step of paused ranks, or of some of them."""
        self.on_loop(lambda: self.group.step(ranks))
        self.on_loop(self.model.client._pump)


@contextmanager
def serving(settings: Settings | None = None, **options: Any) -> Iterator[FakeServed]:
    """A server of the tiny model's tokenizer and limits, on a free port."""
    served = FakeServed(
        Options(data_parallel_size=2, enable_expert_parallel=True, **options), settings or Settings(port=0)
    )
    try:
        yield served
    finally:
        served.close()
