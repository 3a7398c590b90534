"""What scripts do with the object that `LLM.get_tokenizer()` returns, compared with transformers' tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import BOS, EOS, save

from hocket.errors import ConfigError
from hocket.tokenizer.idioms import ChatTokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ mood or '' }}>{% endif %}"
)
CHAT = [{"role": "user", "content": "In the beginning"}]


@pytest.fixture
def both(tmp_path: Path) -> tuple[ChatTokenizer, Any]:
    from transformers import AutoTokenizer

    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    path = save(tmp_path, config | {"chat_template": TEMPLATE})
    return ChatTokenizer.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def test_chat_templates(both: tuple[ChatTokenizer, Any]) -> None:
    ours, theirs = both
    for options in ({}, {"add_generation_prompt": True}, {"add_generation_prompt": True, "mood": "glad"}):
        text = ours.apply_chat_template(CHAT, tokenize=False, **options)
        assert text == theirs.apply_chat_template(CHAT, tokenize=False, **options)
        expected = theirs.apply_chat_template(CHAT, tokenize=True, return_dict=True, **options)
        assert ours.apply_chat_template(CHAT, tokenize=True, **options) == expected["input_ids"]
        assert ours.apply_chat_template(CHAT, return_dict=True, **options) == dict(expected)
        assert ours.apply_chat_template([CHAT, CHAT], tokenize=False, **options) == [text, text]
    assert ours.apply_chat_template(CHAT, tokenize=False, chat_template="{{ 'x' }}") == "x"
    with pytest.raises(ConfigError, match="return_tensors"):
        ours.apply_chat_template(CHAT, return_tensors="pt")


def test_calls(both: tuple[ChatTokenizer, Any]) -> None:
    ours, theirs = both
    for text in ("In the beginning", ["In the", "beginning"], ""):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours("In the").input_ids == ours.encode("In the")
    assert ours("In the").attention_mask == [1] * len(ours.encode("In the"))
    assert ours("In the beginning", truncation=True, max_length=2).input_ids == ours.encode("In the beginning")[:2]
    with pytest.raises(ConfigError, match="return_tensors"):
        ours("x", return_tensors="pt")  # type: ignore[arg-type]


def test_names(both: tuple[ChatTokenizer, Any]) -> None:
    ours, theirs = both
    for name in ("eos_token", "bos_token", "eos_token_id", "bos_token_id", "pad_token", "pad_token_id", "vocab_size"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.convert_tokens_to_ids([BOS, EOS]) == theirs.convert_tokens_to_ids([BOS, EOS])


def test_decoding(both: tuple[ChatTokenizer, Any]) -> None:
    ours, theirs = both
    ids = [0, *ours.encode("In the beginning"), 1]
    for given in (ids, ids[3]):
        assert ours.decode(given) == theirs.decode(given)
    assert ours.decode(ids, skip_special_tokens=True) == "In the beginning"
    assert ours.batch_decode([ids, ids[:2]]) == theirs.batch_decode([ids, ids[:2]])
