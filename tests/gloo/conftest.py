"""Fixtures of the tests that run several ranks."""

from faulty import fault_file
from rank_fixtures import checkpoints, groups

__all__ = ["checkpoints", "fault_file", "groups"]
