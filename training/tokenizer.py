"""Train the byte-level BPE tokenizer of ``tiny`` (2,048 entries) and write it in Hugging Face form."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from corpus import load
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 2048
BOS, EOS, USER, ASSISTANT = SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")
BOS_ID, EOS_ID, USER_ID, ASSISTANT_ID = range(4)

# Words keep their leading space; a run of punctuation, of digits or of white space stands alone.
SPLIT_PATTERN = r"'(?:s|t|d|m|ll|re|ve)| ?[A-Za-z]+| ?\d{1,3}| ?[^\sA-Za-z\d]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + eos_token }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train(texts: list[str]) -> Tokenizer:
    """Learn the merges from ``texts``; encoding puts ``<|bos|>`` in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, BOS_ID)]
            ),
        ]
    )
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """Return the contents of ``tokenizer_config.json``."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": [USER, ASSISTANT],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }


def main() -> None:
    """Train on the training split and write ``tokenizer.json`` and ``tokenizer_config.json``."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=here / "work" / "corpus.jsonl")
    parser.add_argument("--out", type=Path, default=here.parent / "hocket" / "assets" / "tiny")
    args = parser.parse_args()
    chapters = load(args.corpus)
    tokenizer = train([c.text for c in chapters if c.split == "train"])
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    (args.out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(), indent=2) + "\n")
    for split in ("train", "heldout"):
        texts = [c.text for c in chapters if c.split == split]
        tokens = sum(len(e.ids) - 1 for e in tokenizer.encode_batch(texts))
        print(f"{split:8} {tokens:9,} tokens, {sum(map(len, texts)) / tokens:.3f} characters a token")


if __name__ == "__main__":
    main()
