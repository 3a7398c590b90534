"""Starts a rank: `python -m hocket.start_rank --rank …`, as the launcher does. Knows nothing of what one is."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """What torch's modules consist of stays: collections while it is imported, and the engine's first one, would look
    through all of it and find nothing (0.3 s of a rank's start)."""
    gc.disable()
    from hocket import rank

    gc.freeze()
    gc.enable()
    return rank.main()


if __name__ == "__main__":
    sys.exit(main())
