"""Tests that need one NVIDIA GPU: where there is none none of them is collected."""

import torch

if torch.cuda.device_count() < 1:
    collect_ignore_glob = ["test_*.py"]
