"""The `hocket` command's entry: ends quietly on Ctrl-C, from its first import on. Knows none of the sub-commands."""

from __future__ import annotations

import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command line; returns its exit code: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted.

    What a command needs is imported in here, so that Ctrl-C while that happens is handled like any later one.
    """
    try:
        from hocket.cli.app import run

        return run()
    except KeyboardInterrupt:
        print("hocket: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
