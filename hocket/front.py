"""What a front has before its ranks: the tokenizer, what makes requests of prompts, and what hosts must have alike.

Knows no ranks; torch-free.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hocket import __version__
from hocket.config.engine import EngineConfig
from hocket.config.hosts import HostConfig
from hocket.config.options import Options
from hocket.generation_config import GenerationConfig
from hocket.processor import Processor
from hocket.tokenizer.idioms import ChatTokenizer


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
