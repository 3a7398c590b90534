"""Sizes beyond the model are refused in one line before a rank starts, whatever command was given them."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_cli import _logging_stays, run

__all__ = ["_logging_stays"]
RANKS = ("--data-parallel-size", "2", "--enable-expert-parallel")
LONG = " ".join(["It is a truth universally acknowledged"] * 300)
MESSAGES = {
    "verify": (
        ("verify", "--prompt-len", "1017"),
        "prompt_len: 1017 is not allowed with 8 tokens of output; allowed: at most 1016 (max_model_len 1024)",
    ),
    "verify, shorter": (
        ("verify", "--prompt-len", "90", "--max-model-len", "64"),
        "prompt_len: 90 is not allowed with 8 tokens of output; allowed: at most 56 (max_model_len 64)",
    ),
    "trace": (
        ("trace", *RANKS, "--prompt-len", "1024"),
        "prompt_len: 1024 is not allowed with 1 tokens of output; allowed: at most 1023 (max_model_len 1024)",
    ),
    "trace of decodes": (
        ("trace", *RANKS, "--phase", "decode", "--prompt-len", "1000", "--num-steps", "20", "--skip", "9"),
        "prompt_len: 1000 is not allowed with 30 tokens of output; allowed: at most 994 (max_model_len 1024)",
    ),
    "trace of text": (("trace", *RANKS, "--prompt", LONG), "(max_model_len 1024)"),
    "throughput": (
        ("bench", "throughput", "--input-len", "1000", "--output-len", "25"),
        "input_len: 1000 is not allowed with 25 tokens of output; allowed: at most 999 (max_model_len 1024)",
    ),
    "overlap": (
        ("bench", "overlap", "--prompt-len", "1020"),
        "prompt_len: 1020 is not allowed with 8 tokens of output; allowed: at most 1016 (max_model_len 1024)",
    ),
    "step": (("bench", "step", *RANKS, "--context", "5000"), "at most 1024 (the model's max_position_embeddings)"),
    "generate": (("generate", "--prompt", LONG), "(max_model_len 1024)"),
    "generate, ids": (("generate", "--prompt-token-ids", "1,2,3,4", "--max-model-len", "4"), "(max_model_len 4)"),
    "chat": (("generate", "--chat", "--prompt", LONG), "(max_model_len 1024)"),
}


class Started(BaseException):
    """A rank was to be started."""


def refuse(*_: object) -> None:
    raise Started


@pytest.mark.parametrize("case", MESSAGES)
def test_before_anything_starts(
    case: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments, expected = MESSAGES[case]
    monkeypatch.setattr("hocket.dist.launcher.RankGroup.start", refuse)
    monkeypatch.chdir(tmp_path)
    code = run(monkeypatch, *arguments, "--model", "tiny")
    out, err = capsys.readouterr()
    assert err.startswith("hocket: "), err
    assert err.endswith(f"{expected}\n")
    assert err.count("\n") == 1
    assert code == (1 if "CapacityError" in err else 2)
    assert not out


@pytest.mark.parametrize("command", [("verify",), ("bench", "throughput")])
def test_of_a_file_of_prompts(
    command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("hocket.dist.launcher.RankGroup.start", refuse)
    (tmp_path / "prompts").write_text(f"In the\n{LONG}\n")
    arguments = (*command, "--model", "tiny", "--prompts-file", f"{tmp_path}/prompts")
    assert run(monkeypatch, *arguments) == 1
    assert "with one token of output at most 1023 fit" in capsys.readouterr().err
    (tmp_path / "prompts").write_text("In the\nbeginning\n")
    with pytest.raises(Started):
        run(monkeypatch, *arguments)
