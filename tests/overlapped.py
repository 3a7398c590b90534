"""The same test with overlap off, on, and forced; and that steps were split where they should have been."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from answers import settled_stats
from counters import assert_add_up

from hocket.llm import LLM

DUAL = {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}


@dataclass(frozen=True)
class Mode:
    """off; dual: two ubatches from 2 tokens per rank on; forced: every step, whatever its size.

    options: for `groups.llm(...)`.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_on(self) -> bool:
        return self.name != "off"

    def check(self, ranks: Sequence[dict[str, Any]], least: int = 1) -> Counter[str]:
        """Counters add up, and at least so many steps were split; without overlap none. Gives steps by reason."""
        found = assert_add_up(ranks, 1 + self.is_on)
        assert found["split"] >= least if self.is_on else found["split"] == 0, found
        if self.name == "forced":
            assert set(found) <= {"split", "no_work", "prefix_hazard"}
        assert not any(rank["failed"] for rank in ranks)
        return found

    def check_llm(self, llm: LLM, least: int = 1) -> Counter[str]:
        """`check` of an engine's counters once its ranks sleep."""
        return self.check(settled_stats(llm), least)


def mode(name: str, monkeypatch: pytest.MonkeyPatch) -> Mode:
    """The mode `name`; "forced" sets an environment variable that engines read when they are made."""
    if name == "forced":
        monkeypatch.setenv("HOCKET_FORCE_SPLIT", "2")
    return Mode(name, DUAL if name == "dual" else {})


OFF_DUAL_FORCED = pytest.mark.parametrize("overlap", ["off", "dual", "forced"], indirect=True)
OFF_FORCED = pytest.mark.parametrize("overlap", ["off", "forced"], indirect=True)
