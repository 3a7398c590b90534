"""Train ``tiny`` from the corpus and the tokenizer.  One run, fixed seed, resumable; see README.md.

The length of a run is given in minutes or in steps; the learning rate and the window length follow the share of
it that has passed, so that any budget ends with the rate at zero.  With ``--steps`` a run repeats exactly on
the same machine and library; with ``--minutes`` the number of steps depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from dataclasses import asdict
from pathlib import Path

import model as model_module
import torch
from corpus import load
from data import Stream
from evaluate import evaluate
from model import Tiny, TinyConfig
from optim import Rates, make_optimizers
from tokenizers import Tokenizer

MICRO_TOKENS = 4096  # small enough for the activations to stay in the cache
WARMUP_STEPS = 80
COOLDOWN = 0.6  # share of the run over which the rate falls to zero
LENGTHS = ((0.4, 256), (0.88, 512), (1.0, 1024))  # (until this share of the run, window length)
BALANCE = 0.01


def keep_memory() -> None:
    """Tell glibc to reuse large blocks rather than map fresh pages for every temporary."""
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return
    for option, value in ((-3, 1 << 30), (-1, (1 << 31) - 1), (-2, 1 << 28)):  # mmap and trim thresholds, top pad
        libc.mallopt(option, value)


def rate(share: float, step: int) -> float:
    """Return the learning rate as a share of its peak."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (1.0 - share) / COOLDOWN)


class Run:
    """A training run: model, optimisers, data and the place in the schedule."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.chapters = load(args.corpus)
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer))
        self.model = Tiny(TinyConfig(dropout=args.dropout))
        rates = Rates(matrix=args.lr, matrix_decay=args.weight_decay)
        self.optimizers = make_optimizers(self.model, rates)
        self.stream = Stream(self.tokenizer, self.chapters, args.seed)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.checkpoint = args.out / "last.pt"

    @property
    def share(self) -> float:
        """Share of the budget that has passed."""
        by_time = self.seconds / 60 / self.args.minutes if self.args.minutes else 0.0
        by_step = self.step / self.args.steps if self.args.steps else 0.0
        return min(1.0, max(by_time, by_step))

    def save(self) -> None:
        """Write the checkpoint (by way of a second file, so that it is whole at any time)."""
        state = {
            "config": asdict(self.model.c),
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "stream": self.stream.state(),
            "rng": torch.get_rng_state(),
            "counters": (self.step, self.tokens, self.seconds),
        }
        draft = self.checkpoint.with_suffix(".tmp")
        torch.save(state, draft)
        draft.replace(self.checkpoint)

    def resume(self) -> None:
        """Go on from the checkpoint."""
        state = torch.load(self.checkpoint, weights_only=True)
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.stream.restore(state["stream"])
        torch.set_rng_state(state["rng"])
        self.step, self.tokens, self.seconds = state["counters"]

    def train_step(self) -> tuple[float, float]:
        """Make one update; returns (cross-entropy, balancing loss)."""
        length = next(n for until, n in LENGTHS if self.share < until or until == 1.0)
        factor = rate(self.share, self.step)
        parts = self.args.batch_tokens // MICRO_TOKENS
        total = balance = 0.0
        for _ in range(parts):
            inputs, targets = self.stream.take(MICRO_TOKENS // length, length)
            entropy, uneven = self.model.loss(inputs, targets, torch.bfloat16)
            ((entropy + BALANCE * uneven) / parts).backward()
            total, balance = total + entropy.item() / parts, balance + uneven.item() / parts
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += parts * MICRO_TOKENS
        return total, balance

    def report(self, quick: bool) -> None:
        """Print and log the held-out figures."""
        self.model.eval()
        with torch.compiler.set_stance("force_eager"):
            figures = evaluate(self.model, self.tokenizer, self.chapters, torch.bfloat16, quick).as_dict()
        self.model.train()
        place = {"step": self.step, "tokens": self.tokens, "minutes": round(self.seconds / 60, 2), "quick": quick}
        with (self.args.out / "log.jsonl").open("a") as log:
            log.write(json.dumps({**place, **figures}) + "\n")
        print("held-out", json.dumps(figures), flush=True)

    def train(self) -> None:
        """Run to the end of the budget."""
        self.model.train()
        next_report = self.seconds + 60 * self.args.report_every
        loss, mark, mark_tokens = 0.0, time.perf_counter(), self.tokens
        while self.share < 1.0:
            started = time.perf_counter()
            now, balance = self.train_step()
            loss = now if loss == 0.0 else 0.97 * loss + 0.03 * now
            self.seconds += time.perf_counter() - started
            if self.step % 50 == 0:
                speed = (self.tokens - mark_tokens) / (time.perf_counter() - mark)
                mark, mark_tokens = time.perf_counter(), self.tokens
                print(
                    f"step {self.step} minutes {self.seconds / 60:.1f} share {self.share:.3f} "
                    f"pass {self.stream.epoch} loss {loss:.4f} balance {balance:.3f} tokens/s {speed:.0f}",
                    flush=True,
                )
            if self.seconds >= next_report and self.share < 1.0:
                next_report += 60 * self.args.report_every
                self.report(quick=True)
                self.save()
        self.save()
        self.report(quick=False)


def main() -> None:
    """Read the command line and train."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=here / "work" / "corpus.jsonl")
    parser.add_argument("--tokenizer", type=Path, default=here.parent / "hocket" / "assets" / "tiny" / "tokenizer.json")
    parser.add_argument("--out", type=Path, default=here / "work" / "run", help="folder of checkpoint and log")
    parser.add_argument("--minutes", type=float, default=0.0, help="budget in minutes of training")
    parser.add_argument("--steps", type=int, default=0, help="budget in updates")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens of an update, a multiple of 4096")
    parser.add_argument("--lr", type=float, default=0.02, help="peak rate of the matrices")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="decay of the matrices")
    parser.add_argument("--dropout", type=float, default=0.0, help="on the outputs of the residual branches")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--report-every", type=float, default=5.0, help="minutes between held-out reports")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--no-compile", action="store_true", help="do not compile the small element-wise functions")
    args = parser.parse_args()
    if not args.minutes and not args.steps:
        parser.error("give --minutes or --steps")
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    keep_memory()
    if not args.no_compile:
        model_module.normalize = torch.compile(model_module.normalize, dynamic=False)
        model_module.rotate = torch.compile(model_module.rotate, dynamic=False)
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    if args.resume:
        run.resume()
    run.train()


if __name__ == "__main__":
    main()
