"""`python -m hocket`: the same as the `hocket` command, for torchrun's `-m`."""

import sys

from hocket.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
