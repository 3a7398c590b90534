"""Triton kernels on a CPU, in Triton's interpreter: collected only where Triton is installed and was asked to interpret
(`make test-triton`), since that holds for the whole process."""

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
