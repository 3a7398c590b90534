"""Streaming text: no half characters, no half stop strings, the same text however it is cut into pieces."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import EOS, byte_fallback, byte_level
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from hocket.request import SamplingParams
from hocket.tokenizer.detokenizer import Detokenizer, StopChecker, token_bytes
from hocket.tokenizer.tokenizer import Tokenizer

byte_level = functools.cache(byte_level)
byte_fallback = functools.cache(byte_fallback)
TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
texts = st.text(st.characters(codec="utf-8"), max_size=30)
cuts = st.lists(st.integers(0, 40), max_size=6)


def pieces(ids: Sequence[int], cuts: list[int]) -> list[Sequence[int]]:
    ends = [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise([0, *ends])]


def run(
    tokenizer: Tokenizer, parts: Sequence[Sequence[int]], prompt: Sequence[int] = (), **params: Any
) -> tuple[list[str], Detokenizer, str | None]:
    """All texts shown, one after each part, the last one after the end."""
    detokenizer = Detokenizer(tokenizer, prompt, SamplingParams(max_tokens=None, **params))
    shown = []
    for part in parts:
        stop = detokenizer.update(part)
        shown.append(detokenizer.text)
        if stop is not None:
            return shown, detokenizer, stop
    stop = detokenizer.update([], is_last=True)
    return [*shown, detokenizer.text], detokenizer, stop


def assert_grows(shown: list[str]) -> None:
    for earlier, later in itertools.pairwise(shown):
        assert later.startswith(earlier)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(text=texts, cuts=cuts)
def test_any_cut_of_any_text_gives_decode(kind: str, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown, _, _ = run(tokenizer, pieces(ids, cuts))
    assert_grows(shown)
    assert shown[-1] == tokenizer.decode(ids)


def complete_characters(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Plain reference for ids that are the beginning of a valid text."""
    if tokenizer.decoder_types == ["ByteLevel"]:
        return b"".join(token_bytes(tokenizer, i) for i in ids).decode(errors="ignore")
    tokens = [tokenizer.backend.id_to_token(i) for i in ids]
    raw = b"".join(bytes([int(t[3:5], 16)]) if t.startswith("<0x") else t.replace("▁", " ").encode() for t in tokens)
    return raw.decode(errors="ignore").removeprefix(" ")


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(text=texts, num_tokens=st.integers(0, 60), cuts=cuts)
def test_an_incomplete_end_is_not_shown(kind: str, text: str, num_tokens: int, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text, add_special_tokens=False)[:num_tokens]
    shown, _, _ = run(tokenizer, pieces(ids, cuts))
    assert_grows(shown)
    assert shown[-1] == complete_characters(tokenizer, ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 420), max_size=30), cuts=cuts, skip=st.booleans())
def test_any_ids_of_a_byte_level_vocabulary_give_decode(ids: list[int], cuts: list[int], skip: bool) -> None:
    tokenizer = byte_level()
    shown, detokenizer, _ = run(tokenizer, pieces(ids, cuts), skip_special_tokens=skip)
    assert_grows(shown)
    full = tokenizer.decode(ids, skip_special_tokens=skip)
    assert full.startswith(shown[-1])
    assert full[len(shown[-1]) :] in ("", "\ufffd")
    assert detokenizer.num_tokens == len(ids)


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 290), max_size=20), cuts=cuts)
def test_any_ids_of_a_byte_fallback_vocabulary_give_growing_text(ids: list[int], cuts: list[int]) -> None:
    shown, _, _ = run(byte_fallback(), pieces(ids, cuts))
    assert_grows(shown)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=100, deadline=None)
@given(before=st.text("ab é", min_size=1, max_size=12), after=texts)
def test_output_continues_the_prompt(kind: str, before: str, after: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    prompt = tokenizer.encode(before, add_special_tokens=False)
    output = tokenizer.encode(after, add_special_tokens=False)
    shown, _, _ = run(tokenizer, [[i] for i in output], prompt)
    assert tokenizer.decode(prompt) + shown[-1] == tokenizer.decode(prompt + output)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_prompt_may_end_within_a_character(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode("a𝔘b", add_special_tokens=False)
    first = next(i for i in range(len(ids)) if tokenizer.decode(ids[: i + 1]).endswith("\ufffd"))
    shown, _, _ = run(tokenizer, [[i] for i in ids[first + 1 :]], ids[: first + 1])
    assert shown[-1] == "𝔘b"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_real_replacement_character_is_shown_at_once(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode("a\ufffd", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [], SamplingParams())
    detokenizer.update(ids)
    assert detokenizer.text == "a\ufffd"


def test_special_tokens() -> None:
    tokenizer = byte_level()
    ids = [1, *tokenizer.encode("a"), 2]
    assert run(tokenizer, [ids])[0][-1] == "a"
    assert run(tokenizer, [ids], skip_special_tokens=False)[0][-1] == f"{EOS}a<|user|>"


def test_spaces_between_special_tokens() -> None:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    backend.add_special_tokens(["<x>", "<y>"])
    tokenizer = Tokenizer(backend, {})
    ids = [0, 3, 4, 1]
    assert run(tokenizer, [[i] for i in ids], skip_special_tokens=False)[0][-1] == "a <x> <y> b"
    together = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert run(tokenizer, [[i] for i in ids], **together)[0][-1] == "a <x><y> b"
    assert run(tokenizer, [[i] for i in ids])[0][-1] == "a b"


def reference_stop(text: str, stops: list[str], include: bool, first_end: int = 0) -> tuple[str, str | None]:
    """Plain reference: look at every prefix of the text, shortest first."""
    for end in range(first_end + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


stop_lists = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=400, deadline=None)
@given(text=st.text("abcd", max_size=20), stops=stop_lists, include=st.booleans(), cuts=cuts)
def test_stop_strings_over_any_cut(text: str, stops: list[str], include: bool, cuts: list[int]) -> None:
    checker = StopChecker(stops, include_in_output=include)
    shown = []
    for char_pieces in pieces([ord(c) for c in text], cuts):
        for char in char_pieces:
            if checker.append(chr(char)):
                break
        shown.append(checker.text[: len(checker.text) - checker.num_held_back])
        if checker.stop_string is not None:
            break
    assert_grows([*shown, checker.text])
    assert (checker.text, checker.stop_string) == reference_stop(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(text=st.text("abcd", max_size=20), stops=stop_lists, include=st.booleans())
def test_stop_strings_in_one_piece(text: str, stops: list[str], include: bool) -> None:
    checker = StopChecker(stops, include_in_output=include)
    assert checker.append(text) == (checker.stop_string is not None)
    assert (checker.text, checker.stop_string) == reference_stop(text, stops, include)


@pytest.mark.parametrize("include", [False, True])
def test_streaming_and_not_streaming_show_the_same(include: bool) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("In the beginning God created")
    one, _, stop = run(tokenizer, [ids], stop=["ning G"], include_stop_str_in_output=include)
    many, detokenizer, _ = run(tokenizer, [[i] for i in ids], stop=["ning G"], include_stop_str_in_output=include)
    assert_grows(many)
    assert stop == "ning G"
    assert one[-1] == many[-1] == ("In the beginning G" if include else "In the begin")
    assert all("ning" not in text for text in many[:-1]) or include
    kept = tokenizer.decode(ids[: detokenizer.num_tokens])
    assert "ning G" in kept
    assert "ning G" not in tokenizer.decode(ids[: detokenizer.num_tokens - 1])


def test_text_that_may_begin_a_stop_string_is_shown_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("abc")
    shown, _, stop = run(tokenizer, [ids], stop=["cd"])
    assert shown == ["ab", "abc"]
    assert stop is None


def test_min_tokens_ignores_stop_strings_completed_before() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.encode(char)[0] for char in "xaxaxa"]
    shown, detokenizer, stop = run(tokenizer, [[i] for i in ids], stop=["a"], min_tokens=3)
    assert (shown[-1], stop, detokenizer.num_tokens) == ("xax", "a", 4)
    shown, _, _ = run(tokenizer, [ids], stop=["a"], min_tokens=3)
    assert shown[-1] == "xax"


@pytest.mark.parametrize("include", [False, True])
def test_text_of_a_stop_token(include: bool) -> None:
    tokenizer = byte_level()
    ids = [tokenizer.encode(char)[0] for char in "ab"]
    params = SamplingParams(stop_token_ids=[ids[1]], include_stop_str_in_output=include)
    detokenizer = Detokenizer(tokenizer, [], params)
    detokenizer.update(ids, ends_with_stop_token=True, is_last=True)
    assert detokenizer.text == ("ab" if include else "a")
    assert detokenizer.num_tokens == 2
