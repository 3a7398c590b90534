"""A probe's process: `python -m hocket.doctor.child MODULE FOLDER INDEX` calls MODULE's `probe(task)`.

What it finds and how far it got is in a file that the front reads, also after a crash. Knows no probe; torch-free.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from hocket.dist.processes import end_with_parent


class Task:
    """What one process of a probe works on and reports to.

    index of count processes in `folder`, which they share; arguments: the probe's own, plain values.
    """

    def __init__(self, folder: str, index: int) -> None:
        self.folder = folder
        self.index = index
        given = json.loads(Path(folder, "arguments").read_text(encoding="utf-8"))
        self.count: int = given["count"]
        self.arguments: dict[str, Any] = given["arguments"]
        self._notes = notes_file(folder, index)

    def at(self, what: str) -> None:
        """Say what comes now: a probe that gets stuck is stuck there."""
        self._note(at=what)

    def found(self, value: Any) -> None:
        """Report something, plain values only. What was reported stays, whatever happens later."""
        self._note(found=value)

    def failed(self, error: str) -> None:
        self._note(error=error)

    def _note(self, **entry: Any) -> None:
        with self._notes.open("a", encoding="utf-8") as notes:
            notes.write(json.dumps(entry) + "\n")


def notes_file(folder: str, index: int) -> Path:
    """Where process `index` reports: one JSON object a line."""
    return Path(folder, f"notes-{index}")


def described(error: BaseException) -> str:
    """One line of an error: kind, and the message's first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def main() -> None:
    """Run the probe; ends without waiting for what it started (its peers may be inside a collective)."""
    module, folder, index = sys.argv[1], sys.argv[2], int(sys.argv[3])
    end_with_parent(folder)  # the last to see it removes what others wrote meanwhile
    faulthandler.enable()
    task = Task(folder, index)
    code = 0
    try:
        task.at("importing what it needs")
        importlib.import_module(module).probe(task)
    except Exception as error:  # whatever is wrong with this host is the finding
        task.failed(described(error))
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
