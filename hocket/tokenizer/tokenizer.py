"""A tokenizer from a checkpoint directory: text to ids and back. Knows nothing of requests, chats or torch."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from hocket.errors import ConfigError

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_KEEP_ALL_TEXT = {"ByteLevel", "Split", "Digits", "Punctuation"}
"""Pre-tokenizers that drop nothing."""
_FLAG_CLASSES = ("LlamaTokenizerFast", "LlamaTokenizer", "CodeLlamaTokenizerFast", "GemmaTokenizerFast")


class Tokenizer:
    """`tokenizer.json` with the special-token rules of `tokenizer_config.json`, ids equal to those of transformers.

    backend: the `tokenizers.Tokenizer`. config: tokenizer_config.json ({} when there is none).
    special_tokens: name -> text, of those that are set. special_ids: ids left out by skip_special_tokens.
    vocab_size: 1 + the largest id.
    """

    def __init__(self, backend: Backend, config: dict[str, Any]) -> None:
        self.backend = backend
        self.config = config
        self.special_tokens = {
            name: text for name in SPECIAL_TOKEN_NAMES if (text := _token_text(config.get(name))) is not None
        }
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        _register_added_tokens(backend, config, list(self.special_tokens.values()))
        self._apply_bos_eos_flags()
        added = backend.get_added_tokens_decoder()
        self.added_token_ids: frozenset[int] = frozenset(added)
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._decoded: dict[int, str] = {}

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Tokenizer:
        """Load from a directory with tokenizer.json, or from that file itself.

        Raises ConfigError when the file is missing or unreadable.
        """
        file = Path(path)
        file = file if file.is_file() else file / "tokenizer.json"
        if not file.is_file():
            allowed = "a directory with a tokenizer.json (or --skip-tokenizer-init and token ids as prompts)"
            raise ConfigError("tokenizer", str(path), allowed)
        try:
            backend = Backend.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError("tokenizer", str(file), f"a readable tokenizer.json ({reason})") from error
        return cls(backend, read_tokenizer_config(file.parent))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`. Raises ConfigError for text that is not Unicode (lone surrogates)."""
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise ConfigError("prompt", text[:80], "valid Unicode text") from error

    def least_tokens(self, text: str) -> int:
        """A number of tokens that `text` is sure to have, known without counting them; 0 where nothing is known."""
        return 0 if self._max_token_bytes is None else len(text) // self._max_token_bytes

    @functools.cached_property
    def _max_token_bytes(self) -> int | None:
        """Most bytes of text that a token stands for; None where one may stand for any number: only a byte-level
        vocabulary with all bytes, and nothing before it that drops text, says how long its tokens are."""
        vocab = self.backend.get_vocab(with_added_tokens=True)
        added = self.backend.get_added_tokens_decoder().values()
        before = self.backend.pre_tokenizer
        kinds = set() if before is None else _pre_tokenizer_types(json.loads(before.__getstate__()))
        keeps_all = self.backend.normalizer is None and kinds <= _KEEP_ALL_TEXT
        keeps_all = keeps_all and not any(token.lstrip or token.rstrip for token in added)
        if not keeps_all or not set(pre_tokenizers.ByteLevel.alphabet()) <= vocab.keys():
            return None
        return max(*map(len, vocab), *(len(token.content.encode()) for token in added))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids without a token are left out."""
        return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def decode_one(self, token_id: int) -> str:
        """Text of one token on its own, special ones included (cached: log-probabilities ask for thousands)."""
        text = self._decoded.get(token_id)
        if text is None:
            text = self._decoded[token_id] = self.backend.decode([token_id], skip_special_tokens=False)
        return text

    def id_of(self, text: str | None) -> int | None:
        return None if text is None else self.backend.token_to_id(text)

    @property
    def bos_token_id(self) -> int | None:
        return self.id_of(self.special_tokens.get("bos_token"))

    @property
    def eos_token_id(self) -> int | None:
        return self.id_of(self.special_tokens.get("eos_token"))

    @property
    def decoder_types(self) -> list[str]:
        """Types of the decoders in order, as named in tokenizer.json."""
        if self.backend.decoder is None:
            return []
        return _decoder_types(json.loads(self.backend.decoder.__getstate__()))

    def _apply_bos_eos_flags(self) -> None:
        """Let add_bos_token / add_eos_token of the config replace tokenizer.json's post-processor, in Llama's family.

        So do that family's classes in transformers (add_bos_token: true when absent); in all others tokenizer.json
        decides. DeepSeek's checkpoints say only there that a prompt begins with BOS.
        """
        if self.config.get("tokenizer_class") not in _FLAG_CLASSES and self.backend.post_processor is not None:
            return
        template, special = ["$A:0"], []
        bos, eos = self.special_tokens.get("bos_token"), self.special_tokens.get("eos_token")
        if self.config.get("add_bos_token", self.config.get("tokenizer_class") in _FLAG_CLASSES) and bos is not None:
            template.insert(0, f"{bos}:0")
            special.append((bos, self.backend.token_to_id(bos)))
        if self.config.get("add_eos_token") and eos is not None:
            template.append(f"{eos}:0")
            special.append((eos, self.backend.token_to_id(eos)))
        self.backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def read_tokenizer_config(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json of a directory, {} when there is none."""
    file = directory / "tokenizer_config.json"
    if not os.path.lexists(file):
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("tokenizer", str(file), f"a readable JSON file ({error})") from error
    if not isinstance(config, dict):
        raise ConfigError("tokenizer", str(file), "a JSON object")
    return config


def _token_text(value: object) -> str | None:
    """A special token of the config: its text, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _register_added_tokens(backend: Backend, config: dict[str, Any], special_tokens: list[str]) -> None:
    """Tokens that only the config knows. Known ones keep their id; what the config names as special becomes special."""
    known = set(backend.get_vocab(with_added_tokens=True))
    declared = config.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _token_text(token)
        if text is not None and isinstance(token, dict) and text not in known:
            flags = {key: bool(token.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            backend.add_tokens([AddedToken(text, **flags)])
    extra = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    extra = extra.values() if isinstance(extra, dict) else extra
    names = special_tokens + [text for token in extra if (text := _token_text(token)) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in names])


def _pre_tokenizer_types(state: dict[str, Any]) -> set[str]:
    """Types of what cuts a text before tokens are looked for; those that drop the text they cut at say so."""
    if state.get("type") == "Sequence":
        return {name for inner in state["pretokenizers"] for name in _pre_tokenizer_types(inner)}
    return {f"{state.get('type')}{' Removed' * (state.get('behavior') == 'Removed')}"}


def _decoder_types(state: dict[str, Any]) -> list[str]:
    if state.get("type") != "Sequence":
        return [str(state.get("type"))]
    return [name for inner in state["decoders"] for name in _decoder_types(inner)]
