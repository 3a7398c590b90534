"""Ranks over a stand-in for DeepEP whose buffers never get destroyed, as where another rank is gone (see
patched_ranks.py): the library lets no other thread of the process run meanwhile."""

from __future__ import annotations

import ctypes

import fake_deep_ep

HANG_S = 1000


def install() -> None:
    fake_deep_ep.install()
    fake_deep_ep.Buffer.destroy = _never  # type: ignore[method-assign]


def _never(_buffer: fake_deep_ep.Buffer) -> None:
    ctypes.PyDLL(None).sleep(HANG_S)  # a PyDLL keeps the interpreter's lock
