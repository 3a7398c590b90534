"""Loading tokenizers, and their special tokens, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_tokenizers import BOS, EOS, USER, byte_fallback, byte_level, save
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from hocket.config.resolve import model_folder
from hocket.errors import ConfigError
from hocket.tokenizer.tokenizer import Tokenizer

TEXTS = ["In the beginning", " Größe 你好\n\n🎉", f"a{EOS} b {USER}c", ""]


def test_text_survives(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(save(tmp_path))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(f"a{EOS}b")) == "ab"


def test_ids_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    config = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"}
    theirs = PreTrainedTokenizerFast.from_pretrained(str(save(tmp_path, config)))
    ours = Tokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_special_tokens_as_text_or_object() -> None:
    tokenizer = byte_level({"bos_token": {"__type": "AddedToken", "content": BOS}, "eos_token": EOS, "pad_token": None})
    assert tokenizer.special_tokens == {"bos_token": BOS, "eos_token": EOS}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_ids == {0, 1, 2}
    bare = byte_level({})
    assert (bare.bos_token_id, bare.eos_token_id) == (None, None)


@pytest.mark.parametrize(
    ("config", "begin", "end"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [], []),  # only Llama's family listens to the flags
        ({"tokenizer_class": "LlamaTokenizerFast"}, [0], []),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False}, [0], []),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False}, [], []),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "add_eos_token": True}, [], [1]),
        ({"tokenizer_class": "LlamaTokenizerFast", "add_eos_token": True}, [0], [1]),
        ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": None}, [], []),
    ],
)
def test_bos_and_eos_flags(config: dict[str, Any], begin: list[int], end: list[int]) -> None:
    tokenizer = byte_level({"bos_token": BOS, "eos_token": EOS} | config)
    bare = byte_level().encode("the earth", add_special_tokens=False)
    assert tokenizer.encode("the earth") == begin + bare + end
    assert tokenizer.encode("the earth", add_special_tokens=False) == bare


def test_post_processor_of_tokenizer_json_counts_outside_that_family(tmp_path: Path) -> None:
    save(tmp_path, {"bos_token": BOS, "tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False})
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS}:0 $A:0", special_tokens=[(BOS, 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_pretrained(tmp_path).encode("a")[0] == 0


def test_tokens_that_only_the_config_knows() -> None:
    added = {"500": {"content": "<|new|>", "special": True}, "501": {"content": "<|plain|>", "special": False}}
    tokenizer = byte_level({"added_tokens_decoder": added, "additional_special_tokens": ["<|more|>"]})
    ids = tokenizer.encode("<|new|><|plain|><|more|>")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "<|plain|>"
    assert tokenizer.vocab_size == max(ids) + 1


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = Backend.from_file(str(save(tmp_path) / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_pretrained(tmp_path).encode("In the beginning") == byte_level().encode("In the beginning")


def test_decode_one_shows_special_tokens_and_ignores_unknown_ids() -> None:
    tokenizer = byte_level()
    assert tokenizer.decode_one(1) == EOS
    assert tokenizer.decode_one(1) == EOS
    assert tokenizer.decode_one(10**6) == ""
    assert tokenizer.decode([10**6, 1, *tokenizer.encode("a")]) == "a"


def test_a_file_or_its_directory(tmp_path: Path) -> None:
    save(tmp_path, {"eos_token": EOS})
    assert Tokenizer.from_pretrained(tmp_path / "tokenizer.json").eos_token_id == 1


def test_missing_and_broken_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--skip-tokenizer-init") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"readable tokenizer\.json") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
    for wrong in ("{", "[]"):
        save(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text(wrong)
        with pytest.raises(ConfigError, match="tokenizer_config"):
            Tokenizer.from_pretrained(tmp_path)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(ConfigError, match="Unicode"):
        byte_level().encode("a\ud800b")


def test_least_tokens_is_never_too_many() -> None:
    tiny = Tokenizer.from_pretrained(model_folder("tiny"))
    longest = max(tiny.backend.get_vocab(), key=len)
    for text in ("", "In the beginning", longest.replace("Ġ", " ") * 50, "naïve 🜁" * 40, " " * 5000, "a" * 5000):
        assert tiny.least_tokens(text) <= len(tiny.encode(text, add_special_tokens=False))
    assert tiny.least_tokens("x" * 100_000) > 1000
    assert byte_fallback().least_tokens("x" * 100_000) == 0  # nothing is known
    normalized = json.loads(tiny.backend.to_str()) | {"normalizer": {"type": "Lowercase"}}
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    cut = json.loads(tiny.backend.to_str())
    cut["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, cut["pre_tokenizer"]]}
    for other in (normalized, cut):
        assert Tokenizer(Backend.from_str(json.dumps(other)), {}).least_tokens("x" * 100_000) == 0


def test_decoder_types() -> None:
    assert byte_level().decoder_types == ["ByteLevel"]
    assert byte_fallback().decoder_types == ["Replace", "ByteFallback", "Fuse", "Strip"]
    backend = Backend.from_str(json.dumps(json.loads(byte_level().backend.to_str()) | {"decoder": None}))
    assert Tokenizer(backend, {}).decoder_types == []


def test_an_unreadable_config_is_one_line(tmp_path: Path) -> None:
    (save(tmp_path) / "tokenizer_config.json").mkdir()  # as unreadable to root as to anybody
    with pytest.raises(ConfigError, match="readable JSON") as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)
