"""Obtain and clean the public-domain English texts that the model ``tiny`` is trained on.

Two sources, both shipped as Debian packages:

* the King James Bible (``bible-kjv-text``, read with the ``bible`` command of ``bible-kjv``);
* six novels by Jane Austen (``r-cran-janeaustenr``, an R data base of one text line per string).

The result is one JSON-lines file, one chapter a line: ``{"source", "name", "split", "text"}``.  Every 25th
chapter of each source is held out (``split == "heldout"``) and is never trained on.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
import subprocess
import tempfile
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

DEBIAN_PACKAGES = ("bible-kjv", "bible-kjv-text", "r-cran-janeaustenr")
HELDOUT_EVERY = 25
HELDOUT_OFFSET = 12

_VERSE = re.compile(r"^(\d?[A-Za-z]+?)(\d+):(\d+) (.*)$")
_CHAPTER = re.compile(r"^\s*chapter\s+[ivxl\d]+\.?\s*$", re.IGNORECASE)
_FURNITURE = re.compile(r"^\s*(volume\s+[ivx\d]+|the end|finis|end of volume.*)\.?\s*$", re.IGNORECASE)


@dataclass
class Chapter:
    """One document of the corpus."""

    source: str
    name: str
    split: str
    text: str


def fetch_packages(work: Path) -> Path:
    """Download the Debian packages into ``work`` and unpack them there (nothing is installed)."""
    root = work / "root"
    root.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *DEBIAN_PACKAGES], cwd=work, check=True, stderr=subprocess.DEVNULL)
    for deb in sorted(work.glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(deb), str(root)], check=True)
    return root


def read_kjv(root: Path) -> Iterator[tuple[str, str]]:
    """Yield (chapter name, text) of the King James Bible, one verse a line, without verse numbers."""
    command = [str(root / "usr/bin/bible"), "-f", "-p", str(root / "usr/lib"), "gen1:1-rev22:21"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    name, verses = "", list[str]()
    for line in output.splitlines():
        match = _VERSE.match(line)
        if match is None:
            continue
        book, chapter, _, verse = match.groups()
        if f"{book} {chapter}" != name:
            if verses:
                yield name, "\n".join(verses)
            name, verses = f"{book} {chapter}", []
        verses.append(" ".join(verse.replace("[", "").replace("]", "").split()))
    if verses:
        yield name, "\n".join(verses)


def read_austen(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (novel, lines) from the lazy-load data base of the R package."""
    import rdata

    data = root / "usr/lib/R/site-library/janeaustenr/data"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        index = rdata.conversion.convert(rdata.parser.parse_file(data / "Rdata.rdx"))["variables"]
        blob = (data / "Rdata.rdb").read_bytes()
        for novel, (offset, length) in sorted(index.items()):
            record = blob[int(offset) : int(offset) + int(length)]
            raw = zlib.decompress(record[4:])
            if len(raw) != struct.unpack(">I", record[:4])[0]:
                raise ValueError(f"{novel}: damaged record in Rdata.rdb")
            yield str(novel), [str(line) for line in rdata.conversion.convert(rdata.parser.parse_data(raw))]


def novel_chapters(lines: list[str]) -> Iterator[str]:
    """Split a novel into chapters; paragraphs are unwrapped to one line each, headings dropped."""
    chapters: list[list[str]] = []
    paragraph: list[str] = []

    def flush() -> None:
        if paragraph and chapters:
            text = " ".join(" ".join(paragraph).replace("_", "").split())
            chapters[-1].append(text)
        paragraph.clear()

    for line in lines:
        if line.strip().upper() == "A NOTE ON THE TEXT":
            break
        if _CHAPTER.match(line):
            flush()
            chapters.append([])
        elif not line.strip() or _FURNITURE.match(line):
            flush()
        else:
            paragraph.append(line)
    flush()
    for paragraphs in chapters:
        if paragraphs:
            yield "\n".join(paragraphs)


def clean(text: str) -> str:
    """Keep printable ASCII and newlines; turn the few foreign marks into plain ones."""
    for old, new in (("‘", "'"), ("’", "'"), ("“", '"'), ("”", '"'), ("—", "--"), ("£", "L"), ("*", "")):
        text = text.replace(old, new)
    return "".join(c for c in text if c == "\n" or " " <= c <= "~")


def build(root: Path) -> list[Chapter]:
    """Read every source below ``root`` and assign the held-out chapters."""
    named: dict[str, list[tuple[str, str]]] = {"kjv": list(read_kjv(root)), "austen": []}
    for novel, lines in read_austen(root):
        named["austen"] += [(f"{novel} {i + 1}", text) for i, text in enumerate(novel_chapters(lines))]
    chapters = []
    for source, documents in named.items():
        for i, (name, text) in enumerate(documents):
            split = "heldout" if i % HELDOUT_EVERY == HELDOUT_OFFSET else "train"
            chapters.append(Chapter(source, name, split, clean(text)))
    return chapters


def load(path: Path) -> list[Chapter]:
    """Read a corpus file written by this script."""
    return [Chapter(**json.loads(line)) for line in path.read_text().splitlines()]


def main() -> None:
    """Write the corpus and print its size by source and split."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "work" / "corpus.jsonl")
    parser.add_argument("--root", type=Path, help="folder with the packages already unpacked (default: download)")
    args = parser.parse_args()
    if args.root is not None:
        chapters = build(args.root)
    else:
        with tempfile.TemporaryDirectory() as work:
            chapters = build(fetch_packages(Path(work)))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(asdict(c)) + "\n" for c in chapters))
    for source in dict.fromkeys(c.source for c in chapters):
        for split in ("train", "heldout"):
            texts = [c.text for c in chapters if (c.source, c.split) == (source, split)]
            print(f"{source:8} {split:8} {len(texts):5} chapters {sum(map(len, texts)):9,} characters")


if __name__ == "__main__":
    main()
