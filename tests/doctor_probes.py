"""Probes that go wrong, and faults that are planted in the real ones (`patched_ranks.environment_of`)."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from hocket.doctor.child import Task


def probe(task: Task) -> None:
    """As arguments["what"] says, one entry for each process."""
    what = task.arguments["what"][task.index]
    task.found({"pid": os.getpid()})
    task.at(f"about to {what}")
    if what == "hang":
        time.sleep(1000)
    elif what == "raise":
        raise ValueError("planted\nwith a second line")
    elif what == "die":
        print("last words", flush=True)
        os._exit(9)
    elif what == "crash":
        os.abort()
    task.found({"index": task.index, "count": task.count})


def hang_in_all_gather() -> None:
    """The second rank of the transfers never begins its all-gather."""
    if _is_second_rank():
        from hocket.dist import collectives

        collectives.all_gather = lambda *_: time.sleep(1000)


def lose_an_element() -> None:
    """What the second rank of the transfers gets in an all-to-all is wrong in one place."""
    if _is_second_rank():
        from hocket.dist import collectives

        move = collectives.all_to_all

        def wrong(output: Any, *others: Any) -> None:
            move(output, *others)
            output[0] += 1

        collectives.all_to_all = wrong


def _is_second_rank() -> bool:
    return "hocket.doctor.links" in sys.orig_argv and sys.orig_argv[-1] == "1"
