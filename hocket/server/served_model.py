"""The served model: its tokenizer on threads, its ranks, and what becomes of it when a rank is lost. Knows no HTTP."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from hocket.balance import Balance, PrefixMemory
from hocket.config.options import Options
from hocket.dist.headless import say
from hocket.dist.processes import REMIND_S, listed
from hocket.errors import CapacityError, ConfigError, HocketError, RankLost
from hocket.llm import LLM
from hocket.metrics.show import Metrics
from hocket.server.async_client import AsyncClient, Item, Results
from hocket.server.errors import unavailable
from hocket.tokenizer.idioms import ChatTokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)
_INLINE_CHARS = 2000
"""Shorter texts are tokenised at once: in less time than handing them to a thread takes."""
_NUM_THREADS = 2
_LOOK_S = 0.05
_WORTH_SAYING_S = 1.0


class ServedModel:
    """An LLM that many callers share on the running loop.

    restart: when a rank is lost, start all anew; again only after a request was finished since. Otherwise, and when
    that fails, `on_end` is called with the error. on_leaving: told who, where another host's server was told to end.
    prefix_affinity: ranks get requests whose prompts' beginnings they have.
    """

    def __init__(
        self,
        llm: LLM,
        options: Options,
        *,
        restart: bool,
        on_end: Callable[[HocketError], None],
        progress: bool = True,
        on_leaving: Callable[[str], None] | None = None,
        prefix_affinity: bool = True,
    ) -> None:
        self.llm = llm
        self._prefix_affinity = prefix_affinity
        self.options = options
        self.problem: str | None = None
        """Why no request can be taken now."""
        self._restarts = restart
        self._on_end = on_end
        self._on_leaving = on_leaving
        self._is_closing = False
        self._progress = progress
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hocket-tokenize")
        self.num_restarts = 0
        self.metrics: Metrics | None = None
        self._connect()

    def count_into(self, metrics: Metrics) -> None:
        """From now on, also over restarts."""
        self.metrics = self.llm.client.listener = metrics

    def _connect(self) -> None:
        self.llm.client.balance = self._new_balance()
        self.llm.client.listener = self.metrics
        self.client = AsyncClient(self.llm.client, self._lost)
        if self._on_leaving is not None:
            self.llm.client.group.watch_leaving(self._on_leaving)

    def _new_balance(self) -> Balance:
        """By tokens, and by the prefixes that caches have where they keep any and there is a choice."""
        cache, num_blocks = self.llm.config.cache, [rank["num_blocks"] for rank in self.llm.ranks]
        is_by_prefix = self._prefix_affinity and cache.enable_prefix_caching and len(num_blocks) > 1
        prefixes = PrefixMemory.of_caches(num_blocks, cache.block_size) if is_by_prefix else None
        first_rank = self.llm.client.group.ranks[0]
        return Balance(len(num_blocks), by_tokens=True, prefixes=prefixes, first_rank=first_rank)

    # -- requests ----------------------------------------------------------------------------------------------

    def submit(self, items: Sequence[Item], *, whole: bool) -> Results:
        """Queue requests; whole: their results are only told when they are finished.

        Raises:
            ApiError: no request can be taken now. ConfigError, CapacityError: one of them cannot be served.
        """
        self.check()
        return self.client.submit(items, whole=whole)

    def check(self) -> None:
        """Raise ApiError where no request can be taken now."""
        if self.problem is not None:
            raise unavailable(self.problem)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and what follows it."""
        return self.llm.config.scheduler.max_model_len

    def loads(self) -> list[dict[str, int]]:
        """By rank: requests in flight, and tokens that they are expected to need computed."""
        counts = zip(self.llm.client.num_requests_per_rank(), self.llm.client.num_tokens_per_rank(), strict=True)
        return [{"requests": requests, "tokens": tokens} for requests, tokens in counts]

    # -- texts -------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> ChatTokenizer | None:
        """None with skip_tokenizer_init."""
        return None if self.options.skip_tokenizer_init else self.llm.get_tokenizer()

    def need_tokenizer(self) -> ChatTokenizer:
        if self.tokenizer is None:
            raise ConfigError("skip_tokenizer_init", True, "false", where="for this request, which needs the tokenizer")
        return self.tokenizer

    async def encode(self, text: str, *, add_special_tokens: bool, is_prompt: bool = True) -> list[int]:
        """Token ids; a long text does not keep the loop. Raises CapacityError for a prompt that is sure to be too long,
        before its tokens are counted."""
        encode = self.need_tokenizer().encode
        if is_prompt and (least := self.need_tokenizer().least_tokens(text)) >= self.max_model_len:
            raise CapacityError(
                f"the prompt has {least} tokens or more; with one token of output at most {self.max_model_len - 1} fit "
                f"(max_model_len {self.max_model_len})"
            )
        if len(text) <= _INLINE_CHARS:
            return encode(text, add_special_tokens=add_special_tokens)
        return await self.on_thread(lambda: encode(text, add_special_tokens=add_special_tokens))

    async def decode(self, token_ids: list[int]) -> str:
        decode = self.need_tokenizer().decode
        return await self.on_thread(lambda: decode(token_ids, skip_special_tokens=False))

    async def texts_of(self, token_ids: list[int]) -> list[str]:
        """Each token by itself."""
        decode = self.need_tokenizer().batch_decode
        return await self.on_thread(lambda: decode([[token_id] for token_id in token_ids]))

    async def render(self, messages: list[Any], **template: Any) -> str:
        """The prompt of a conversation, by the model's template. Raises ConfigError where that refuses it."""
        chat = self.need_tokenizer().template()
        try:
            return await self.on_thread(lambda: chat.render(messages, **template))
        except RecursionError:
            raise ConfigError("messages", "…", "fewer levels of lists and objects") from None

    async def check_schema(self, schema: str) -> None:
        """Raise ConfigError for a JSON schema that no output can follow."""
        processor = self.llm.client.processor
        await self.on_thread(lambda: processor.check_schema(schema))

    async def on_thread(self, what: Callable[[], T]) -> T:
        """What takes long is done here, so that the loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, what)

    # -- the end -----------------------------------------------------------------------------------------------

    def _lost(self, error: HocketError) -> None:
        self.problem = f"{type(error).__name__}: {error}"
        if self.metrics is not None:
            self.metrics.lost(time.monotonic())
        is_hopeless = self.num_restarts > 0 and self.client.num_finished == 0
        if not self._restarts or is_hopeless or self._is_closing:
            self._on_end(error)
            return
        say(f"{self.problem}; starting all ranks anew")
        self.problem += "; all ranks are being started anew"
        # A thread of its own, which does not keep the process when that is told to end.
        begin = (asyncio.get_running_loop(), self.problem)
        threading.Thread(target=self._start_anew, args=begin, name="hocket-restart", daemon=True).start()

    def _start_anew(self, loop: asyncio.AbstractEventLoop, problem: str) -> None:
        def tell(what: str) -> None:
            if not self._is_closing:
                self.problem = f"{problem}: {what}"

        try:
            self.llm.close()
            found: LLM | HocketError = LLM.from_options(
                self.options, progress=self._progress, hosts=self.llm.hosts, on_wait=tell
            )
        except HocketError as failure:
            found = failure
        except Exception as failure:
            found = RankLost(f"the ranks could not be started anew: {type(failure).__name__}: {failure}")
        try:
            loop.call_soon_threadsafe(self._restarted, found)
        except RuntimeError:  # the loop has ended meanwhile
            if isinstance(found, LLM):
                found.close()

    def _restarted(self, found: LLM | HocketError) -> None:
        if self._is_closing:
            if isinstance(found, LLM):
                found.close()
            return
        if isinstance(found, HocketError):
            self.problem = f"{type(found).__name__}: {found}"
            self._on_end(found)
            return
        self.llm, self.problem = found, None
        self.num_restarts += 1
        self._connect()
        say(f"serving again: {self.llm.summary()}")

    def leave(self) -> None:
        """Tell the servers of other hosts to end too: they need this one's ranks."""
        self.llm.client.group.leave()

    async def wait_for_others(self, is_over: Callable[[], bool]) -> None:
        """Nobody is answered here any more: keep the ranks while other hosts' servers still need them. They know, and
        have limits of their own. is_over: whether to wait no longer."""
        group = self.llm.client.group
        group.drained()
        said_at = time.monotonic() - REMIND_S + _WORTH_SAYING_S
        while (needed_by := group.needed_by) and self.client.lost is None and not is_over():
            if time.monotonic() > said_at + REMIND_S:
                said_at = time.monotonic()
                say(f"waiting for the servers with rank {listed(needed_by)} to end; a signal ends all at once")
            await asyncio.sleep(_LOOK_S)

    def drain(self) -> None:
        """Take no more requests, and start nothing anew."""
        self._is_closing = True
        self.problem = self.problem or "the server is shutting down"

    def close(self) -> None:
        """End the ranks. Texts that threads still work on are given up."""
        self._is_closing = True
        self.client.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.llm.close()
