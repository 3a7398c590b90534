"""Tests that run Triton's kernels on the CPU, interpreted: `make test-triton`. Elsewhere none of them is collected.

The interpreter multiplies matrices of fp32 only, and slowly: small shapes. `tests/gpu1` has the rest.
"""

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
