"""Small tokenizers for tests: trained or made on the spot, one of each kind of decoder."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from hocket.tokenizer.tokenizer import Tokenizer

BOS, EOS, USER = "<|bos|>", "<|eos|>", "<|user|>"
CORPUS = [
    "In the beginning God created the heaven and the earth.",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife.",
    "Größe, façade, naïve; 你好世界 こんにちは 🎉🎉",
] * 4


@functools.cache
def byte_level_json() -> str:
    """A byte-level BPE of about 400 tokens, ids 0 to 2 special, as tokenizer.json."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[BOS, EOS, USER],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def byte_level(config: dict[str, Any] | None = None) -> Tokenizer:
    config = {"bos_token": BOS, "eos_token": {"content": EOS, "__type": "AddedToken"}} if config is None else config
    return Tokenizer(Backend.from_str(byte_level_json()), config)


def byte_fallback() -> Tokenizer:
    """SentencePiece's kind: pieces with ▁ for a space, and <0xNN> for every byte without one."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz", "▁t", "▁th", "▁the", "é", "\ufffd"]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1)]
    )
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


def save(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """tokenizer.json and, with `config`, tokenizer_config.json."""
    (directory / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
