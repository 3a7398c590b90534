"""Tests that need two NVIDIA GPUs: where there are fewer none of them is collected (but see gpus.py)."""

from gpus import left_out
from rank_fixtures import checkpoints, groups
from v2_lite import judge, spoilt

__all__ = ["checkpoints", "groups", "judge", "spoilt"]

collect_ignore_glob = left_out(2)
