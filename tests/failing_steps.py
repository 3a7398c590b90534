"""Makes one forward pass of a rank raise, when a file says so. For tests only; ranks call `install` at their start.

The file FAIL_FILE holds "rank ubatch stage" once; the rank that it names raises there in its next step.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hocket.engine import Engine
from hocket.models.base import DecoderLayer
from hocket.ubatch.context import current

FAIL_FILE = "FAIL_FILE"
LAYER = 2


def install() -> None:
    build = Engine.__init__

    def build_and_arm(self: Engine, *args: Any) -> None:
        build(self, *args)
        layer = self.runner.model.layers[LAYER]
        assert isinstance(layer, DecoderLayer)
        for stage, owner in {"attention": layer, "router": layer.mlp, "experts": layer.mlp}.items():
            _arm(self, getattr(owner, stage), stage)

    Engine.__init__ = build_and_arm  # type: ignore[method-assign]


def _arm(engine: Engine, module: Any, stage: str) -> None:
    forward = module.forward

    def maybe_raise(*args: Any, **kwargs: Any) -> Any:
        path, context = Path(os.environ[FAIL_FILE]), current()
        try:
            wanted = path.read_text().split()
        except FileNotFoundError:  # nothing planted, or another rank has just raised and taken it away
            wanted = []
        if context is not None and wanted == [str(engine.mesh.rank), str(context.idx), stage]:
            path.unlink()
            raise ValueError(f"planted in {stage}")
        return forward(*args, **kwargs)

    module.forward = maybe_raise
