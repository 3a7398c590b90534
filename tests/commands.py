"""A running command and what it writes to standard error, line by line. For tests only."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Mapping, Sequence

LIMIT_S = 90.0


class Command:
    """lines: what it has written so far."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                with self._arrived:
                    self.lines.append(line.rstrip())
                    self._arrived.notify_all()

    def wait_for(self, text: str) -> str:
        """The line with `text`."""
        with self._arrived:
            found = self._arrived.wait_for(lambda: [line for line in self.lines if text in line], LIMIT_S)
        assert found, self.lines
        return str(found[0])

    def ended(self) -> int:
        """Its exit code."""
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return code

    def kill(self) -> None:
        """End it if it still runs, and read what is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(LIMIT_S)
