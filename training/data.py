"""Token windows for training and for held-out evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from corpus import Chapter
from tokenizer import ASSISTANT_ID, BOS_ID, EOS_ID, USER_ID
from tokenizers import Tokenizer
from torch import Tensor

CHAT_SHARE = 0.06
NEWLINE = "\n"


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode without ``<|bos|>``."""
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


class Stream:
    """Endless training windows; the order depends on the seed alone, so that a run can be resumed or repeated.

    In each pass the chapters are shuffled, joined and cut into windows.  A window starts with ``<|bos|>`` wherever
    it falls, as a prompt does.  A small share of the chapters is laid out as a conversation in which the assistant
    goes on where the user's paragraph ends, so that the chat template is not foreign to the model.
    """

    def __init__(self, tokenizer: Tokenizer, chapters: list[Chapter], seed: int) -> None:
        texts = [c.text for c in chapters if c.split == "train"]
        self.plain = [np.array([BOS_ID, *ids, EOS_ID], dtype=np.int64) for ids in encode(tokenizer, texts)]
        self.paragraphs = [encode(tokenizer, text.split(NEWLINE)) for text in texts]
        self.newline = encode(tokenizer, [NEWLINE])[0]
        self.seed = seed
        self.epoch = self.position = self.length = 0
        self.windows = np.empty((0, 0), dtype=np.int64)

    def conversation(self, paragraphs: list[list[int]], rng: np.random.Generator) -> np.ndarray:
        """Lay a chapter out as turns of one user paragraph and one to three paragraphs of reply."""
        ids: list[int] = []
        i = 0
        while i + 1 < len(paragraphs):
            end = min(i + 2 + int(rng.integers(3)), len(paragraphs))
            reply = [t for p in paragraphs[i + 1 : end] for t in (*self.newline, *p)][len(self.newline) :]
            ids += [BOS_ID, USER_ID, *paragraphs[i], ASSISTANT_ID, *reply, EOS_ID]
            i = end
        return np.array(ids, dtype=np.int64)

    def restart(self, epoch: int, length: int) -> None:
        """Prepare the windows of one pass."""
        rng = np.random.default_rng((self.seed, epoch))
        chat = rng.random(len(self.plain)) < CHAT_SHARE
        parts = [
            self.conversation(self.paragraphs[i], rng) if chat[i] else self.plain[i]
            for i in rng.permutation(len(self.plain))
        ]
        stream = np.concatenate(parts)[int(rng.integers(length)) :]
        rows = len(stream) // length
        self.windows = stream[: rows * length].reshape(rows, length)[rng.permutation(rows)]
        self.epoch, self.position, self.length = epoch, 0, length

    def take(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return (inputs, targets) of ``rows`` windows of ``length`` tokens."""
        if length != self.length or self.position + rows > len(self.windows):
            self.restart(self.epoch + 1, length)
        targets = torch.from_numpy(self.windows[self.position : self.position + rows])
        self.position += rows
        inputs = torch.cat((torch.full((rows, 1), BOS_ID), targets[:, :-1]), 1)
        return inputs, targets

    def state(self) -> dict[str, int]:
        """Return where the stream is."""
        return {"epoch": self.epoch, "position": self.position, "length": self.length}

    def restore(self, state: dict[str, int]) -> None:
        """Go back to a place returned by ``state``."""
        self.restart(state["epoch"], state["length"])
        self.position = state["position"]


@dataclass
class HeldOut:
    """One window of a held-out chapter; the first ``skip`` targets are context and are not scored."""

    source: str
    ids: Tensor
    skip: int


def heldout_windows(tokenizer: Tokenizer, chapters: list[Chapter], length: int, stride: int) -> Iterator[HeldOut]:
    """Cut the held-out chapters so that each token is scored once.

    A window is ``<|bos|>`` and up to ``length - 1`` tokens, of which the last ``stride`` or fewer are scored, so that
    a token far enough into its chapter has at least ``length - 1 - stride`` tokens before it.
    """
    held = [c for c in chapters if c.split == "heldout"]
    for chapter, ids in zip(held, encode(tokenizer, [c.text for c in held]), strict=True):
        done = 0
        while done < len(ids):
            end = min(len(ids), max(done + stride, length - 1))
            start = max(0, end - (length - 1))
            yield HeldOut(chapter.source, torch.tensor([BOS_ID, *ids[start:end]]), done - start)
            done = end
