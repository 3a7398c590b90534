"""What a server that records steps says where there is nothing to write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.server.errors import ApiError
from hocket.server.profile import Profiler
from hocket.trace.spans import COMPUTE, Span, Stage, Step


def step(number: int) -> Step:
    found = Step("decode", 1, 4, start_ns=number * 1000, stop_ns=number * 1000 + 500, number=number, clock="one")
    found.spans.append(Span(COMPUTE, 0, 0, Stage.QKV, "", found.start_ns, found.stop_ns))
    return found


def test_steps_of_which_no_rank_has_anothers_are_refused_and_not_drawn(tmp_path: Path) -> None:
    options = Options.from_dict({"device": "cpu", "data_parallel_size": 2, "enable_expert_parallel": True})
    group = SimpleNamespace(ranks=range(2))
    llm = SimpleNamespace(config=resolve(options), client=SimpleNamespace(group=group))
    served: Any = SimpleNamespace(options=options, llm=llm)
    profiler = Profiler(served, str(tmp_path))
    with pytest.raises(ApiError, match="num_steps") as caught:
        profiler._write([[step(1)], [step(2)]], 1)
    assert caught.value.status_code == 409
    assert list(tmp_path.iterdir()) == []
    assert profiler._write([[step(1), step(2)], [step(2), step(3)]], 2)["num_steps"] == 1
