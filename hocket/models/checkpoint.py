"""A folder of safetensors files seen as one set of named tensors. Knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.config.model import read_json
from hocket.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Checkpoint:
    """Open files of a folder; use as a context manager. Only what `read` asks for is read.

    shapes, dtypes: of every tensor by name, dtypes as safetensors spells them ("BF16", "F8_E4M3").
    bytes_read: so far, headers not counted.

    Raises:
        CheckpointError: no files, a file of the index missing or broken, a tensor in two files, or an index that names
        a tensor its file does not have.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.bytes_read = 0
        self._file_of: dict[str, Any] = {}
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
            handle: Any = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            for name in handle.keys():  # noqa: SIM118 (not a mapping)
                if name in self.shapes:
                    raise CheckpointError(f"{self.directory}: {name} is in more than one file ({file} is one of them)")
                entry = handle.get_slice(name)
                self.shapes[name] = tuple(entry.get_shape())
                self.dtypes[name] = str(entry.get_dtype())
                self._file_of[name] = handle
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist, though the index names it") from None
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read: {one_line(error)}") from None

    def read(self, name: str, expert: int | None = None, rows: tuple[int, int] | None = None) -> Tensor:
        """The tensor, or of a stacked one [E, rows, columns] one entry (or some rows of it), on the CPU as stored."""
        handle = self._file_of[name]
        try:
            if expert is None:
                value: Tensor = handle.get_tensor(name)
            elif rows is None:
                value = handle.get_slice(name)[expert : expert + 1][0]
            else:
                value = handle.get_slice(name)[expert : expert + 1, rows[0] : rows[1]][0]
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.directory}: {name} cannot be read: {one_line(error)}") from None
        self.bytes_read += value.numel() * value.element_size()
        return value


def listed(names: Sequence[str], most: int = 4) -> str:
    """The first few names and how many more there are."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def one_line(error: Exception) -> str:
    """The error's message without line breaks."""
    return " ".join(str(error).split())
