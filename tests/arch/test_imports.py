"""The import direction of `hocket/__init__.py`, and that what must not import torch does not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "hocket"

# Higher layers may import lower ones, never the other way round. A module belongs to the longest matching prefix.
LAYERS = [
    ("hocket.cli", "hocket.__main__"),
    ("hocket.server",),
    ("hocket.explain",),
    ("hocket.doctor", "hocket.verify"),
    ("hocket.bench",),
    ("hocket.llm",),
    ("hocket.client", "hocket.rank", "hocket.start_rank", "hocket.metrics"),
    ("hocket.balance",),
    ("hocket.observe",),
    ("hocket.processor", "hocket.prompt", "hocket.generation_config", "hocket.engine", "hocket.dist.launcher"),
    ("hocket.worker",),
    ("hocket.overlap.executor", "hocket.overlap.views"),
    ("hocket.overlap.thread_state", "hocket.overlap.sm_limits"),
    ("hocket.models",),
    ("hocket.attention", "hocket.moe"),
    ("hocket.cache.storage",),
    ("hocket.layers",),
    ("hocket.quant",),
    ("hocket.host", "hocket.launch"),
    ("hocket.ubatch",),
    (
        "hocket.overlap.vote",
        "hocket.overlap.veto",
        "hocket.overlap.slices",
        "hocket.overlap.cost",
        "hocket.overlap.failure",
        "hocket.overlap.schedule",
        "hocket.overlap.sm_budget",
        "hocket.overlap.green_stream",
    ),
    ("hocket.scheduler",),
    ("hocket.cache",),
    ("hocket.dist",),
    ("hocket.channel", "hocket.tokenizer", "hocket.trace", "hocket.metrics.histogram"),
    ("hocket.config", "hocket.request", "hocket.outputs", "hocket.progress", "hocket.envs", "hocket.startup"),
    ("hocket.errors",),
]
# Whole packages, so that a new module in one of them is checked too; the exceptions hold tensors or join the group.
TORCH_FREE = [
    "hocket.errors",
    "hocket.envs",
    "hocket.request",
    "hocket.outputs",
    "hocket.prompt",
    "hocket.progress",
    "hocket.startup",
    "hocket.generation_config",
    "hocket.processor",
    "hocket.balance",
    "hocket.client",
    "hocket.llm",
    "hocket.config",
    "hocket.scheduler",
    "hocket.cache",
    "hocket.channel",
    "hocket.tokenizer",
    "hocket.cli",
    "hocket.server",
    "hocket.bench",
    "hocket.doctor",
    "hocket.explain",
    "hocket.metrics",
    "hocket.verify",
    "hocket.dist",
    "hocket.ubatch",
    "hocket.overlap",
    "hocket.trace",
    "hocket.worker.stats",
    "hocket.moe.placement",
]
WITH_TORCH = [
    "hocket.bench.layer_rank",
    "hocket.cache.storage",
    "hocket.dist.mesh",
    "hocket.dist.world",
    "hocket.dist.collectives",
    "hocket.doctor.backends",
    "hocket.doctor.choice",
    "hocket.doctor.links",
    "hocket.doctor.peers",
    "hocket.doctor.survey",
    "hocket.explain.describe",
    "hocket.explain.memory",
    "hocket.explain.messages",
    "hocket.overlap.views",
    "hocket.overlap.executor",
    "hocket.overlap.thread_state",
    "hocket.overlap.sm_limits",
    "hocket.overlap.green_stream",
    "hocket.ubatch.stamps",
    "hocket.ubatch.stream_lane",
]


def modules() -> dict[str, Path]:
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = ("hocket", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def layer_of(module: str) -> int:
    prefixes = [(prefix, i) for i, group in enumerate(LAYERS) for prefix in group]
    matching = [(len(p), i) for p, i in prefixes if module == p or module.startswith(p + ".")]
    assert matching, f"{module} stands in no layer: add it to LAYERS"
    return max(matching)[1]


def imports_of(path: Path) -> set[str]:
    """Every hocket module a file imports, wherever the import stands, but for type checking."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    known = modules()
    resolved = set()
    for name in names:
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name.startswith("hocket"):
            resolved.add(name)
    return resolved


def test_imports_go_downwards() -> None:
    wrong = []
    for module, path in modules().items():
        if module == "hocket" or path.name == "__init__.py":
            continue
        for imported in imports_of(path):
            if imported != "hocket" and layer_of(imported) < layer_of(module):
                wrong.append(f"{module} imports {imported}, which is above it")
    assert not wrong, "\n".join(wrong)


def test_sub_packages_are_empty() -> None:
    for path in ROOT.rglob("__init__.py"):
        if path.parent != ROOT:
            assert path.read_text(encoding="utf-8").strip() == "", f"{path} must be empty"


def test_only_one_module_calls_collectives() -> None:
    """All go through dist/collectives.py, but for joining the group and the hosts' exchange (dist/world.py)."""
    allowed = {ROOT / "dist" / "collectives.py", ROOT / "dist" / "world.py", ROOT / "dist" / "mesh.py"}
    for path in ROOT.rglob("*.py"):
        if path not in allowed:
            assert "dist.all_" not in path.read_text(encoding="utf-8"), path


def test_what_needs_no_torch_does_not_import_it() -> None:
    """All in one process; the first module after whose import torch is there is named."""
    found = [
        module
        for module in sorted(modules())
        if module not in WITH_TORCH and any(module == free or module.startswith(free + ".") for free in TORCH_FREE)
    ]
    assert len(found) > 40
    code = (
        "import importlib, sys\n"
        f"for module in {found!r}:\n"
        "    importlib.import_module(module)\n"
        "    if 'torch' in sys.modules or 'transformers' in sys.modules:\n"
        "        sys.exit(f'{module} imports torch or transformers')"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, cwd=ROOT.parent)
    assert done.returncode == 0, done.stderr


def test_environment_variables_stand_in_one_table() -> None:
    for path in ROOT.rglob("*.py"):
        if path.name != "envs.py":
            assert '"HOCKET_' not in path.read_text(encoding="utf-8"), f"{path}: read it through hocket/envs.py"


def test_every_module_says_its_job_first() -> None:
    for path in ROOT.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if text.strip():
            assert ast.get_docstring(ast.parse(text)), f"{path} has no docstring"
