"""`LLM`: the offline front door, with vLLM's call and result shapes. Knows nothing of ranks but how many there are."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from hocket import __version__
from hocket.client import EngineClient
from hocket.config.engine import EngineConfig
from hocket.config.hosts import HostConfig
from hocket.config.kernel_caches import caches_text
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.dist.launcher import RankGroup, under_torchrun
from hocket.dist.processes import listed
from hocket.dist.servers import others_of
from hocket.errors import ConfigError, HocketError
from hocket.generation_config import GenerationConfig
from hocket.outputs import RequestOutput
from hocket.processor import Processor
from hocket.progress import Bar, StartUpBars
from hocket.prompt import parse_prompts
from hocket.request import SamplingParams
from hocket.startup import StartUp
from hocket.tokenizer.idioms import ChatTokenizer

logger = logging.getLogger(__name__)
_POLL_S = 1.0
_TORCHRUN_USED = "_HOCKET_TORCHRUN_USED"  # set by us, for this process and what it starts


class LLM:
    """A model, loaded on as many ranks as asked for, that generates text for lists of prompts.

        with LLM("tiny", data_parallel_size=2, enable_expert_parallel=True) as llm:
            for output in llm.generate(["In the beginning"], SamplingParams(max_tokens=20)):
                print(output.outputs[0].text)

    `options` are those of `hocket generate --help`, with underscores. The rank processes end with `close()`, with the
    `with` block, or with this process, whichever comes first. Not for use from several threads at once.

    Raises:
        ConfigError: an option is wrong. CheckpointError: the model cannot be loaded. RankLost: a rank did not start.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._start(Options.from_dict({"model": model, **options}), progress=False)

    @classmethod
    def from_options(
        cls,
        options: Options,
        *,
        progress: bool = False,
        group: RankGroup | None = None,
        hosts: HostConfig | None = None,
        on_wait: Callable[[str], None] | None = None,
        check: Callable[[LLM], None] | None = None,
    ) -> LLM:
        """From checked options. `progress`: show start-up on standard error. `group`: re-use running ranks (of the
        right number), which are left running by `close()`. `hosts`: other hosts have some of the ranks. `on_wait`: told
        which ranks are waited for, and for what. `check`: called before any rank starts; what it raises ends it."""
        llm = cls.__new__(cls)
        llm._start(options, progress=progress, group=group, hosts=hosts, on_wait=on_wait, check=check)
        return llm

    def _start(
        self,
        options: Options,
        *,
        progress: bool,
        group: RankGroup | None = None,
        hosts: HostConfig | None = None,
        on_wait: Callable[[str], None] | None = None,
        check: Callable[[LLM], None] | None = None,
    ) -> None:
        self.options, self.hosts = options, hosts
        self.config: EngineConfig = resolve(options, num_local=hosts.num_ranks if hosts is not None else None)
        started = time.perf_counter()
        self._closing: weakref.finalize[..., LLM] | None = None
        self._group: RankGroup | None = None
        self._ids = itertools.count()
        if under_torchrun():
            _serve_other_ranks(self.config)
        self._tokenizer, self._processor = front_of(options, self.config)
        if check is not None:
            check(self)
        front_s = time.perf_counter() - started
        world_size = self.config.parallel.data_parallel_size
        limit_s = self.config.startup_timeout_s
        others = None
        if hosts is not None:
            # Servers of their own make the configuration themselves; headless hosts get this one's.
            alike = must_agree(options, hosts) | ({"device": self.config.device} if hosts.own_server else {})
            others = others_of(hosts, alike, limit_s, on_wait)
        self._group = group or RankGroup.start(world_size, limit_s, others, on_wait)
        if group is None:
            # Runs when this object goes, at the latest while the interpreter still works; a forked child must not.
            self._closing = weakref.finalize(self, _close, self._group, os.getpid())
        try:
            with StartUpBars(enabled=progress) as bars:
                self.ranks = self._group.configure(self.config, bars.update)
        except BaseException:
            self.close()
            raise
        self.client = EngineClient(self.config, self._group, self._processor)
        of_ranks = [rank["startup_s"] for rank in self.ranks]
        ready, first_rank = time.perf_counter(), self._group.ranks[0]
        self.startup = StartUp(began=started, ready=ready, front_s=front_s, ranks=of_ranks, first_rank=first_rank)
        logger.info("%s", self.summary())

    # -- generating ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        data_parallel_rank: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; results come in the order of the prompts.

        prompts: text, `{"prompt": text}`, `{"prompt_token_ids": ids}` or ids; one or a list. sampling_params: one for
        all, or one per prompt; None: the model's own (generation_config.json). use_tqdm: a progress bar where standard
        error is a terminal. data_parallel_rank: pin prompts to ranks (default: the one with the least to do).

        Raises:
            ConfigError, CapacityError: a prompt or a parameter cannot be served; nothing was started then.
            HocketError: the engine failed; the LLM is closed.
        """
        items = parse_prompts(prompts)
        params = _one_each("sampling_params", sampling_params, len(items))
        ranks = _one_each("data_parallel_rank", data_parallel_rank, len(items))
        ids = [str(next(self._ids)) for _ in items]
        client = self._running_client()
        waiting, done = set(ids), dict[str, RequestOutput]()
        try:
            client.add_many(list(zip(ids, items, params, ranks, strict=True)))
            with Bar("generating", enabled=use_tqdm) as bar:
                while waiting:
                    for result in client.poll(_POLL_S):
                        if result.finished and result.request_id in waiting:
                            waiting.discard(result.request_id)
                            done[result.request_id] = result
                    bar.update(len(done), len(ids))
        except BaseException:  # a wrong prompt, a failed step, Ctrl-C: leave a usable engine behind where there is one
            if self._group is not None and not self._group.closed:
                client.abort(waiting)
            raise
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Apply the chat template to one conversation or a list of them, and generate.

        Raises:
            ConfigError: the model has no chat template and none was given.
        """
        prompts = self.rendered(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def rendered(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """The prompts that `chat` makes of the same, for `generate`. Raises as it does."""
        if self._tokenizer is None:
            raise ConfigError("skip_tokenizer_init", True, "false", where="for chat, which needs the tokenizer")
        template = self._tokenizer.template(chat_template)
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            template.render(
                list(conversation),  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations
        ]
        encode = self._tokenizer.encode
        return [{"prompt": text, "prompt_token_ids": encode(text, add_special_tokens=False)} for text in prompts]

    def check(self, prompts: Any) -> None:
        """Whether `generate` would take these prompts; no rank is asked.

        Raises:
            ConfigError, CapacityError: one is wrong, or is too long for the model.
        """
        for prompt in parse_prompts(prompts):
            self._processor.check(prompt)

    # -- looking in ---------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> ChatTokenizer:
        """The tokenizer, with transformers' usual methods; ConfigError with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise ConfigError("skip_tokenizer_init", True, "false", where="for get_tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json asks for."""
        return self._processor.generation_config.sampling_params()

    def summary(self) -> str:
        """What is running, in one line."""
        config, parallel, ranks = self.config, self.config.parallel, self.ranks
        experts = "all experts on each"
        if parallel.enable_expert_parallel:
            experts = f"{config.model.moe.num_experts} experts over them by {parallel.all2all_backend}"
        experts += f" ({ranks[0]['moe_backend']})"
        if config.overlap.num_ubatches > 1:
            experts += f", {config.overlap.num_ubatches} ubatches ({config.overlap.executor})"
        blocks = " / ".join(str(n) for n in sorted({rank["num_blocks"] for rank in ranks}))
        threads, ready_s = ranks[0]["num_threads"], self.startup.total_s
        many = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"
        if len(ranks) < parallel.data_parallel_size and self.hosts is not None:
            many = f"rank {listed(self.hosts.ranks)} of {parallel.data_parallel_size}"
        return (
            f"{self.options.model} ({config.model.model_type}, {config.dtype}): {many} on {config.device}, "
            f"{threads} thread{'s' * (threads > 1)} each, {experts}; "
            f"KV cache {blocks} blocks of {config.cache.block_size} tokens per rank; ready in {ready_s:.1f} s"
            f"{caches_text(config.device)}"
        )

    def stats(self, *, reset: bool = False) -> list[dict[str, Any]]:
        """Step counters of every rank: steps by phase and reason, tokens, and where the time went (µs)."""
        return self._running_client().stats(reset=reset)

    def _running_client(self) -> EngineClient:
        if self._group is None or self._group.closed:
            raise HocketError("this LLM is closed")
        return self.client

    # -- ending -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the rank processes. May be called again."""
        if self._closing is not None:
            self._closing()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def front_of(options: Options, config: EngineConfig) -> tuple[ChatTokenizer | None, Processor]:
    """What an LLM has besides its ranks: the tokenizer, where there is one, and what makes requests of prompts.

    Raises:
        ConfigError, CheckpointError: the model's folder, or what `options` name, has none that can be read.
    """
    tokenizer: ChatTokenizer | None = None
    if not options.skip_tokenizer_init:
        tokenizer = ChatTokenizer.from_pretrained(options.tokenizer or config.model_path, options.chat_template)
        if options.chat_template is not None:  # else what is wrong with it shows only in the first chat
            tokenizer.template().check()
    processor = Processor(
        tokenizer=tokenizer,
        vocab_size=config.model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        eos_token_ids=config.model.eos_token_ids,
        generation_config=GenerationConfig.from_pretrained(config.model_path),
        seed=options.seed,
    )
    return tokenizer, processor


def must_agree(options: Options, hosts: HostConfig) -> dict[str, Any]:
    """What every host of a server must have been given alike, by name."""
    more = {"the version of hocket": __version__, "a server on every host": hosts.own_server}
    return more | asdict(options)


def _close(group: RankGroup, pid: int) -> None:
    """End the ranks, in the process that started them only."""
    if os.getpid() == pid:
        group.close()


def _serve_other_ranks(config: EngineConfig) -> None:
    """Under torchrun every rank runs the same script: all but rank 0 serve here, and end when rank 0's LLM closes."""
    world_size, asked = int(os.environ["WORLD_SIZE"]), config.parallel.data_parallel_size
    if world_size != asked:
        raise ConfigError("data_parallel_size", asked, f"{world_size}, the number of ranks torchrun started")
    if _TORCHRUN_USED in os.environ:
        raise HocketError("under torchrun a script can make one LLM: the other ranks ended with the first")
    os.environ[_TORCHRUN_USED] = "1"
    if int(os.environ["RANK"]) != 0:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported, as for spawned ranks
        from hocket.rank import join_torchrun

        sys.exit(join_torchrun(config.startup_timeout_s))


def _one_each(field: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ConfigError(field, f"{len(value)} values", f"one, or one per prompt ({count})")
    return list(value)
