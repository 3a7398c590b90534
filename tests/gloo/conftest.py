"""Fixtures of the tests that run several ranks."""

from rank_fixtures import checkpoints, groups

__all__ = ["checkpoints", "groups"]
