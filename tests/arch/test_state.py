"""No layer keeps state between calls where two ubatches could meet in it: it would be the other one's rows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "hocket"
PACKAGES = ("models", "moe", "attention", "layers")
SETTING_UP = ("__init__", "__init_subclass__", "count_expert_load", "sample_expert_load", "open", "close")
ALLOWED = {
    # Depends on positions alone, so whoever made it finds the same; it only grows.
    ("layers/rotary.py", "RotaryEmbedding"),
    # Build models and read files, before anything runs.
    ("moe/factory.py", "MoEFactory"),
    ("models/checkpoint.py", "Checkpoint"),
    # The emulated link is one for all, as a real one is.
    ("moe/transport/link_emulator.py", "LinkEmulator"),
}


def assignments(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """(class, function, attribute) of every write to `self.attribute`, to its elements or in place, by torch's methods
    that end in `_`; outside the functions that set an object up.

    Private classes are left out: they are for objects of one call.
    """
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name[0] != "_"):
        for function in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            if function.name in SETTING_UP:
                continue
            for node in ast.walk(function):
                written = _written(node)
                if not isinstance(written, ast.Attribute) or not isinstance(written.value, ast.Name):
                    continue
                if written.value.id == "self":
                    yield owner.name, function.name, written.attr


def _written(node: ast.AST) -> ast.AST | None:
    """What a node writes to: an attribute, that whose element it is, or that whose method ends in `_`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        if name.endswith("_") and not name.startswith("_"):
            return node.func.value
    return None


FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_r006_nothing_is_kept_on_a_layer_between_calls(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), f"{name} writes a module global"
    found = [entry for entry in assignments(tree) if (name, entry[0]) not in ALLOWED]
    assert not found, f"{name}: keep it in a PerUBatch, or pass it on: {found}"


def test_the_rule_can_fail() -> None:
    for write in ("self.scratch = x", "self.scratch[:2] = x", "self.scratch.copy_(x)"):
        bad = f"class Layer:\n    def forward(self, x):\n        {write}\n        return x\n"
        assert list(assignments(ast.parse(bad))) == [("Layer", "forward", "scratch")]
