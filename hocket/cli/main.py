"""The `hocket` command's entry: ends quietly on Ctrl-C and SIGTERM, from its first import on. Knows no sub-command."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command line; returns its exit code: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted.

    What a command needs is imported in here, so that Ctrl-C while that happens is handled like any later one. SIGTERM
    does the same: ranks are ended by name, as one that hangs would not notice by itself that this process has gone.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        from hocket.cli.app import run

        return run()
    except KeyboardInterrupt:
        print("hocket: interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
