"""A folder of safetensors files seen as one set of named tensors. Knows nothing of models."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.config.model import read_json
from hocket.errors import CheckpointError
from hocket.models.filling import Span, read_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""Of what is ever read, as safetensors spells them."""


class Checkpoint:
    """Open files of a folder; use as a context manager. Only what `read` asks for is read.

    shapes, dtypes: of every tensor by name, dtypes as safetensors spells them ("BF16", "F8_E4M3").

    Raises:
        CheckpointError: no files, a file of the index missing or broken, a tensor in two files, or an index that names
        a tensor its file does not have.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._span_of: dict[str, Span] = {}
        self._stack = ExitStack()
        try:
            index = self._index()
            for file in sorted(set(index.values())) if index else self._without_index():
                self._open(file)
            gone = [name for name in index if name not in self.shapes]
            if gone:
                raise CheckpointError(
                    f"{self.directory / INDEX} names {listed(gone)}, but {index[gone[0]]} does not have it"
                )
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _index(self) -> dict[str, str]:
        """Tensor name → file name; empty where there is no index."""
        path = self.directory / INDEX
        if not path.exists():
            return {}
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path} has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{path}: {name} lies in {file!r}, which is not a file name")
        return weight_map

    def _without_index(self) -> list[str]:
        if (self.directory / SINGLE).exists():
            return [SINGLE]
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not files:
            other = any(path.suffix in (".bin", ".pt", ".pth", ".gguf") for path in self.directory.glob("*"))
            raise CheckpointError(
                f"{self.directory} has no *.safetensors file"
                + ("; other formats are not read: convert it to safetensors" if other else "")
            )
        return files

    def _open(self, file: str) -> None:
        path = self.directory / file
        try:
            with safe_open(path, framework="pt", device="cpu") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    if name in self.shapes:
                        where = f"{name} is in more than one file ({file} is one of them)"
                        raise CheckpointError(f"{self.directory}: {where}")
                    entry = handle.get_slice(name)
                    self.shapes[name] = tuple(entry.get_shape())
                    self.dtypes[name] = str(entry.get_dtype())
            self._span_of.update(_spans(self._stack.enter_context(path.open("rb")).fileno()))
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist, though the index names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from None

    def span(self, name: str, expert: int | None = None, rows: tuple[int, int] | None = None) -> Span:
        """Where the tensor lies, or of a stacked one [E, rows, columns] one entry (or some rows of it)."""
        whole, shape = self._span_of[name], self.shapes[name]
        if expert is None:
            return whole
        row_bytes = whole.num_bytes // (shape[0] * shape[1])
        first, stop = rows or (0, shape[1])
        offset = whole.offset + (expert * shape[1] + first) * row_bytes
        return replace(whole, offset=offset, num_bytes=(stop - first) * row_bytes)

    def read(self, name: str, expert: int | None = None, rows: tuple[int, int] | None = None) -> Tensor:
        """What `span` says, on the CPU as stored."""
        span, shape = self.span(name, expert, rows), self.shapes[name]
        if expert is not None:
            shape = (shape[1] if rows is None else rows[1] - rows[0], shape[2])
        value = torch.empty(span.num_bytes, dtype=torch.uint8)
        with self.naming(name):
            read_bytes(span, 0, value)
        return value.view(span.dtype).view(shape)

    @contextmanager
    def naming(self, name: str) -> Iterator[None]:
        """Inside, failing to read raises a CheckpointError that names the tensor."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self.directory}: {name} cannot be read: {one_line(error)}") from None


def _spans(file: int) -> dict[str, Span]:
    """Of each tensor in a file that safetensors has found sound: eight bytes, the header's length, then the header."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    header = json.loads(os.pread(file, length, 8))
    spans = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            dtype = DTYPES.get(entry["dtype"], torch.uint8)
            spans[name] = Span(file=file, offset=8 + length + begin, num_bytes=end - begin, dtype=dtype)
    return spans


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few names and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def one_line(error: Exception) -> str:
    """The error's message without line breaks."""
    return " ".join(str(error).split())
