"""Tests that need two NVIDIA GPUs: where there are fewer none of them is collected."""

import torch
from rank_fixtures import checkpoints, groups

__all__ = ["checkpoints", "groups"]

if torch.cuda.device_count() < 2:
    collect_ignore_glob = ["test_*.py"]
