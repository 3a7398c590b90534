"""`--trace FILE`: records steps of a run that is there for something else. Knows the files, not what runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hocket.bench.report import check_output
from hocket.bench.trace import about, recorded
from hocket.config.options import Options
from hocket.llm import LLM
from hocket.trace import page, perfetto
from hocket.trace.recording import Recording

PERFETTO = "https://ui.perfetto.dev"


@dataclass(frozen=True, kw_only=True)
class Attached:
    """Record `num_steps` steps into `name`.html and `name`.json. options: of the engine that runs."""

    name: str
    num_steps: int
    options: Options

    @classmethod
    def asked(cls, file: str | None, num_steps: int, options: Options, parts: Iterable[str] = ("",)) -> Attached | None:
        """None: not asked for. The file's ending, .json or .html, may be given or not. parts: what `recording` will
        add to its name.

        Raises:
            ConfigError: its files cannot be written.
        """
        if file is None:
            return None
        name = file.removesuffix(".json").removesuffix(".html")
        found = cls(name=name, num_steps=num_steps, options=options)
        for path in (path for part in parts for path in found._paths(part)):
            check_output(str(path))
        return found

    def _paths(self, part: str) -> tuple[Path, Path]:
        """The page and the events."""
        return Path(f"{self.name}{part}.html"), Path(f"{self.name}{part}.json")

    def give_up(self, part: str, *, has_graphs: bool) -> None:
        """There is nothing to write: say so on standard error."""
        how = "--enforce-eager, as no kernels of graphs can be profiled" if has_graphs else "more or longer prompts"
        why = f"no step that could be recorded was run on every rank; give {how}"
        print(f"hocket: no {self._paths(part)[0]}: {why}", file=sys.stderr)

    def write(self, recording: Recording, part: str) -> None:
        """Write both files and say on standard error what they hold. `part`: added to the name."""
        html, events = self._paths(part)
        page.write({"": recording}, html)
        perfetto.write(recording, events)
        exposed_us, comm_us, step_us = (
            max(one.per_step_us()[name] for one in recording.figures()) for name in ("exposed", "comm", "step")
        )
        comm = f"exposed comm {exposed_us / 1e3:.2f} of {comm_us / 1e3:.2f} ms on the rank with most"
        print(
            f"hocket: {len(recording.ranks[0])} steps of {step_us / 1e3:.2f} ms recorded, "
            f"{'; '.join([comm] * recording.has_comm + recording.notes)}: {html} (a page for any browser), "
            f"{events} ({PERFETTO})",
            file=sys.stderr,
        )


@contextmanager
def recording(
    llm: LLM, attached: Attached | None, what: str, *, phase: str = "", skip: int = 0, part: str = ""
) -> Iterator[None]:
    """Record the steps that run inside: the first ones of `phase` ("": of any) after `skip`. attached None: nothing.

    what: said in the title. part: added to the name of the files. Where no such step ran on every rank there are none,
    and standard error says so: what the run itself gave is worth keeping.
    """
    if attached is None:
        yield
        return
    llm.client.record_steps(attached.num_steps, skip=skip, phase=phase)
    yield
    found = recorded(llm, about(attached.options, llm.config, what))
    if found.ranks[0]:
        attached.write(found, part)
    else:
        attached.give_up(part, has_graphs=bool(llm.config.graphs.sizes))
