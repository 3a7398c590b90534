"""Triton kernels on the CPU, by Triton's interpreter: nothing is collected where Triton is missing.

Run as `TRITON_INTERPRET=1 pytest tests/interpreted` in an environment with triton and numpy; slow, so shapes are tiny.
(A folder named triton would be imported for the package.)
"""

import importlib.util
import os

if importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
