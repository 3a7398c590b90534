"""Where a ubatch must not hand over: inside a torch operator written in Python. Knows nothing of what operators do.

A hand-over there leaves C++ frames of the operator on the stack, whose clean-up is per thread and expects the order of
a stack: with greenlets two such ubatches abort the process. Nothing cheap in torch tells that an operator runs
(inference mode leaves no key of the dispatcher that differs), so the Python frames are searched: every operator called
from Python comes through torch/_ops.py. At 60 ns a frame that is too dear for each hand-over but not for each transfer.
"""

from __future__ import annotations

import sys

from hocket.errors import HocketError


def refuse_inside_operator() -> None:
    """Raise HocketError if a torch operator (torch.library.custom_op and the like) is being run by the caller."""
    torch_ops = sys.modules.get("torch._ops")
    if torch_ops is None:
        return
    inside = torch_ops.__dict__
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals is inside:
            raise HocketError(
                "a ubatch would hand over inside a torch operator (torch.library.custom_op or the like), which "
                "cannot be left half-way: call the sparse layer outside of it, or turn overlap off"
            )
