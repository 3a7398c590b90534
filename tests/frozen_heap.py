"""Ranks that write how many objects their garbage collector leaves out while they step (see patched_ranks.py)."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

from hocket.engine import Engine


def install() -> None:
    step = Engine.step

    def counting(self: Engine) -> Any:
        Path(os.environ["FROZEN_FOLDER"], f"{os.getpid()}").write_text(str(gc.get_freeze_count()))
        return step(self)

    Engine.step = counting  # type: ignore[method-assign]
