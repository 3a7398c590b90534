"""Held-out figures and samples of a model: perplexity, bits per character, balance of the experts."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import Chapter, load
from data import HeldOut, heldout_windows
from model import Tiny, TinyConfig
from tokenizer import BOS_ID, EOS_ID
from tokenizers import Tokenizer
from torch import Tensor

BATCH = 8


@dataclass
class Score:
    """Sums over a source."""

    nats: float = 0.0
    tokens: int = 0
    characters: int = 0

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(self.nats / self.tokens)

    @property
    def bits_per_char(self) -> float:
        """Bits per character of text."""
        return self.nats / math.log(2) / self.characters


@dataclass
class Report:
    """Held-out scores by source (``all`` is the total) and the share of each expert, by layer."""

    scores: dict[str, Score] = field(default_factory=dict)
    load: Tensor = field(default_factory=lambda: torch.zeros(0, 0))

    @property
    def max_over_mean(self) -> list[float]:
        """Load of the busiest expert over the mean, by layer."""
        return (self.load.amax(1) / self.load.mean(1)).tolist()

    @property
    def dead(self) -> int:
        """Number of experts with under a tenth of the mean load."""
        return int((self.load < 0.1 * self.load.mean(1, keepdim=True)).sum())

    def as_dict(self) -> dict[str, object]:
        """Return plain figures."""
        return {
            "perplexity": {k: round(s.perplexity, 3) for k, s in self.scores.items()},
            "bits_per_char": {k: round(s.bits_per_char, 4) for k, s in self.scores.items()},
            "heldout_tokens": {k: s.tokens for k, s in self.scores.items()},
            "load_max_over_mean": [round(x, 3) for x in self.max_over_mean],
            "load_min_over_mean": [round(x, 3) for x in (self.load.amin(1) / self.load.mean(1)).tolist()],
            "dead_experts": self.dead,
        }


@torch.no_grad()
def evaluate(
    model: Tiny,
    tokenizer: Tokenizer,
    chapters: list[Chapter],
    dtype: torch.dtype = torch.float32,
    quick: bool = False,
) -> Report:
    """Score the held-out chapters in windows of the full context with half of it as stride.

    ``quick`` takes a quarter of the chapters and windows without overlap.
    """
    context = model.c.max_position_embeddings
    chapters = [c for c in chapters if c.split == "heldout"][:: 4 if quick else 1]
    stride = context - 1 if quick else context // 2
    windows = sorted(heldout_windows(tokenizer, chapters, context, stride), key=lambda w: len(w.ids))
    report = Report({"all": Score()}, torch.zeros(len(model.moe_layers), model.c.n_routed_experts))
    for chapter in chapters:
        for source in ("all", chapter.source):
            report.scores.setdefault(source, Score()).characters += len(chapter.text)
    for start in range(0, len(windows), BATCH):
        _score_batch(model, windows[start : start + BATCH], dtype, report)
    return report


def _score_batch(model: Tiny, windows: list[HeldOut], dtype: torch.dtype, report: Report) -> None:
    """Add a batch of windows (padded at the right, which a causal model does not see) to the report."""
    width = max(len(w.ids) for w in windows)
    ids = torch.full((len(windows), width), EOS_ID)
    for row, window in zip(ids, windows, strict=True):
        row[: len(window.ids)] = window.ids
    logp = F.log_softmax(model(ids[:, :-1], dtype).float(), -1)
    nats = -logp.gather(2, ids[:, 1:, None]).squeeze(2)
    for row, window in zip(nats, windows, strict=True):
        scored = row[window.skip : len(window.ids) - 1]
        for source in ("all", window.source):
            report.scores[source].nats += float(scored.sum())
            report.scores[source].tokens += scored.numel()
    for i, layer in enumerate(model.moe_layers):
        report.load[i] += layer.load


@torch.no_grad()
def sample(model: Tiny, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float, seed: int) -> str:
    """Continue ``prompt``; the whole text is run again for each token."""
    generator = torch.Generator().manual_seed(seed)
    ids = [BOS_ID, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    for _ in range(tokens):
        logits = model(torch.tensor([ids[-model.c.max_position_embeddings :]]))[0, -1]
        ids.append(int(torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=generator)))
        if ids[-1] == EOS_ID:
            break
    return tokenizer.decode(ids)


def main() -> None:
    """Evaluate a checkpoint of ``train.py``."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=here / "work" / "run" / "last.pt")
    parser.add_argument("--corpus", type=Path, default=here / "work" / "corpus.jsonl")
    parser.add_argument("--tokenizer", type=Path, default=here.parent / "hocket" / "assets" / "tiny" / "tokenizer.json")
    parser.add_argument("--prompt", action="append", default=[], help="print a sample that goes on from this text")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--as-exported", action="store_true", help="round the weights to bfloat16 first")
    args = parser.parse_args()
    state = torch.load(args.checkpoint, weights_only=True)
    model = Tiny(TinyConfig(**state["config"])).eval()
    model.load_state_dict(state["model"])
    if args.as_exported:
        model.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    print(json.dumps(evaluate(model, tokenizer, load(args.corpus)).as_dict(), indent=2))
    for prompt in args.prompt:
        print("---\n" + sample(model, tokenizer, prompt, args.tokens, args.temperature, args.seed))


if __name__ == "__main__":
    main()
