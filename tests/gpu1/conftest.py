"""Tests that need one NVIDIA GPU: where there is none none of them is collected (but see gpus.py)."""

from gpus import left_out

collect_ignore_glob = left_out(1)
