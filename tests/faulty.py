"""Groups of ranks whose engines get the fault that a file names. For tests only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults import FAULT_FILE
from gloo_groups import Groups
from patched_ranks import patched_environment


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Empty: no fault."""
    file = tmp_path_factory.mktemp("fault") / "name"
    file.write_text("")
    return file


@contextmanager
def faulty_groups(install: str, file: Path) -> Iterator[Groups]:
    """Two ranks that call `install` ("module:function") at start, which plants what `file` names."""
    made = Groups()
    with patched_environment(install, **{FAULT_FILE: str(file)}):
        made.get(2)
    yield made
    made.close()
