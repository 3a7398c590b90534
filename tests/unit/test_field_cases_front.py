"""Situations that have broken systems of this kind: options, refusals and text. Each test is named by its row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import more_checkpoints
import pytest
import small_tokenizers
from answers import greedy
from in_process import engine_of, in_process_llm

from hocket.cli.main import main
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import ConfigError
from hocket.llm import LLM

Checkpoints = Callable[..., Path]
TRANSPORTS = ("torch", "allgather_reducescatter")


@pytest.fixture(scope="session")
def checkpoints(checkpoints: Path) -> Checkpoints:
    return more_checkpoints.maker(checkpoints)


# -- command line and options ---------------------------------------------------------------------------------------


def run_cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """`hocket` with these arguments, in this process: exit code and standard error."""
    monkeypatch.setattr("sys.argv", ["hocket", *arguments])
    code = main()
    return code, capsys.readouterr().err


WIDE = ("--data-parallel-size", "2", "--enable-expert-parallel")
DUAL = (*WIDE, "--enable-dbo")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # R103, R106: backends that are not there name those that are.
        *[
            ((*WIDE, "--all2all-backend", name), ("all2all_backend", name, "auto, torch, allgather_reducescatter"))
            for name in ("pplx", "naive", "")
        ],
        *[
            ((*WIDE, "--all2all-backend", name), (name, "the device is cpu", "here: torch, allgather_reducescatter"))
            for name in ("deepep_low_latency", "deepep_high_throughput")
        ],
        (("--moe-backend", "triton"), ("moe_backend", "auto, reference, grouped_mm")),
        (("--attention-backend", "flash"), ("attention_backend", "auto, sdpa")),
        (("--device", "cuda:9"), ("device", "auto, cpu")),
        # R109: experts shared by some of the ranks only.
        (("--data-parallel-size", "2", "--all2all-backend", "torch"), ("all2all_backend", "enable_expert_parallel")),
        (("--expert-parallel-size", "2"), ("--expert-parallel-size", "--help")),
        # R090, R091, R132: one rank, pipelines, tensor parallelism.
        (
            ("--all2all-backend", "torch"),
            ("all2all_backend", "without enable_expert_parallel and data_parallel_size over 1"),
        ),
        (("--pipeline-parallel-size", "2"), ("pipeline_parallel_size", "2", "data_parallel_size")),
        (("--tensor-parallel-size", "2"), ("tensor_parallel_size", "2", "data_parallel_size")),
        # The same with overlap, and overlap where there is nothing to overlap.
        (("--enable-dbo",), ("enable_dbo", "without enable_expert_parallel and data_parallel_size over 1")),
        (("--ubatch-size", "3"), ("ubatch_size", "without enable_expert_parallel and data_parallel_size over 1")),
        (("--data-parallel-size", "2", "--enable-dbo"), ("enable_dbo", "without enable_expert_parallel")),
        ((*DUAL, "--pipeline-parallel-size", "2"), ("pipeline_parallel_size", "2", "data_parallel_size")),
        ((*DUAL, "--expert-parallel-size", "1"), ("--expert-parallel-size", "--help")),
        *[
            ((*DUAL, "--all2all-backend", name), ("all2all_backend", name, "auto, torch, allgather_reducescatter"))
            for name in ("pplx", "link_emulator")
        ],
        # R030: a threshold that would make empty halves.
        ((*DUAL, "--dbo-decode-token-threshold", "1"), ("dbo_decode_token_threshold", "at least 2")),
        ((*DUAL, "--dbo-prefill-token-threshold", "1"), ("dbo_prefill_token_threshold", "at least 2")),
        ((*DUAL, "--dbo-decode-token-threshold", "0"), ("dbo_decode_token_threshold", "from 1 to")),
        (("--block-size", "two"), ("--block-size", "integer")),
        (("--dtype", "fp4"), ("dtype", "fp4", "auto, float32, bfloat16, float16")),
    ],
)
def test_r030_r090_r091_r103_r106_r109_wrong_options_end_in_one_line(
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    expected: tuple[str, ...],
) -> None:
    model = ("generate", "--model", str(checkpoints("qwen3")), "--prompt-token-ids", "5,6")
    code, error = run_cli(monkeypatch, capsys, *model, *arguments)
    assert code == 2
    assert len(error.splitlines()) == 1, error
    assert error.startswith("hocket: ")
    assert all(part in error for part in expected), error


@pytest.mark.parametrize("model_type", ["llama", "mixtral", "gpt_oss", None])
def test_r082_a_model_that_is_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model_type: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 512}))
    code, error = run_cli(monkeypatch, capsys, "generate", "--model", str(tmp_path), *DUAL, "-p", "x")
    assert code == 2
    assert len(error.splitlines()) == 1
    assert (repr(model_type) if model_type else "model_type: is missing") in error
    assert "deepseek_v2, deepseek_v3, qwen3_moe" in error


@pytest.mark.parametrize("backend", [*TRANSPORTS, "auto"])
def test_r106_accepted_backends(checkpoints: Checkpoints, backend: str) -> None:
    options = {"model": str(checkpoints("qwen3")), "data_parallel_size": 2, "enable_expert_parallel": True}
    chosen = resolve(Options.from_dict(options | {"all2all_backend": backend})).parallel.all2all_backend
    assert chosen in TRANSPORTS
    assert backend in ("auto", chosen)


def test_r090_no_value_is_changed_silently(checkpoints: Checkpoints) -> None:
    given: dict[str, Any] = {
        "dtype": "bfloat16",
        "seed": 5,
        "load_format": "dummy",
        "moe_backend": "reference",
        "attention_backend": "sdpa",
        "device": "cpu",
    }
    scheduler = {
        "max_model_len": 100,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 77,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 9,
        "prefill_interval": 2,
    }
    model = {"model": str(checkpoints("qwen3")), "block_size": 5}
    config = resolve(Options.from_dict({**model, **given, **scheduler}))
    assert {name: getattr(config, name) for name in given} == given
    assert {name: getattr(config.scheduler, name) for name in scheduler} == scheduler
    assert config.cache.block_size == 5
    assert config.parallel.data_parallel_size == 1
    wide = {"data_parallel_size": 3, "enable_expert_parallel": True, "ubatch_size": 3, "ubatch_executor": "thread"}
    thresholds = {"dbo_decode_token_threshold": 7, "dbo_prefill_token_threshold": 9}
    config = resolve(Options.from_dict({**model, **given, **scheduler, **wide, **thresholds}))
    assert {name: getattr(config, name) for name in given} == given
    assert {name: getattr(config.scheduler, name) for name in scheduler} == scheduler
    assert (config.overlap.num_ubatches, config.overlap.executor) == (3, "thread")
    assert (config.overlap.decode_token_threshold, config.overlap.prefill_token_threshold) == (7, 9)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe", "kimi_linear"])
def test_r019_a_hybrid_model_is_refused_with_its_kind_of_layer(
    model_type: str, deterministic: bool, tmp_path: Path
) -> None:
    linear = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "vocab_size": 512, **linear}))
    with pytest.raises(ConfigError) as caught:
        resolve(Options(model=str(tmp_path), deterministic=deterministic))
    text = str(caught.value)
    assert "\n" not in text
    assert model_type in text
    assert "linear attention" in text.replace("_", " ")


# -- text -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_text(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A model with a tokenizer that has no chat template."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoints("qwen3"), folder)
    small_tokenizers.save(folder, {"bos_token": small_tokenizers.BOS, "eos_token": small_tokenizers.EOS})
    return folder


def text_llm(path: Path) -> Any:
    return in_process_llm(path, skip_tokenizer_init=False)


def plain_ids(llm: LLM) -> list[int]:
    """Ids whose text is printable on its own, so that any sequence of them is text."""
    decode = llm.get_tokenizer().decode_one
    return [i for i in range(3, 400) if decode(i).isascii() and decode(i).isprintable()]


@pytest.mark.parametrize("include", [False, True])
def test_r118_a_stop_string_across_two_tokens(with_text: Path, include: bool) -> None:
    """The same text as a whole and step by step, where what is shown never has to be taken back."""
    with text_llm(with_text) as llm:
        allowed = {"allowed_token_ids": plain_ids(llm)}
        whole = llm.generate(["In the"], greedy(24, **allowed))[0].outputs[0]
        decode = llm.get_tokenizer().decode_one
        pieces = [decode(i) for i in whole.token_ids]
        assert "".join(pieces) == whole.text
        # The last character of one token and the first of the next, where this pair does not occur earlier.
        cuts = [k for k in range(6, 23) if whole.text.index(stop_at(pieces, k)) == len("".join(pieces[:k])) - 1]
        for k in cuts[:3]:
            stop = stop_at(pieces, k)
            expected = "".join(pieces[:k])[:-1] + (stop if include else "")
            params = greedy(24, stop=[stop], include_stop_str_in_output=include, **allowed)
            at_once = llm.generate(["In the"], params)[0].outputs[0]
            shown = []
            llm.client.add(f"r118-{k}", "In the", params)
            while llm.client.has_unfinished:
                for result in llm.client.poll(1.0):
                    shown.append(result.outputs[0].text)
            assert at_once.text == shown[-1] == expected
            assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
            assert (at_once.finish_reason, at_once.stop_reason) == ("stop", stop)
            assert at_once.token_ids == whole.token_ids[: k + 1]
        assert cuts
        assert not engine_of(llm).has_work


def stop_at(pieces: list[str], k: int) -> str:
    return pieces[k - 1][-1] + pieces[k][0]


def test_r126_no_chat_template(with_text: Path) -> None:
    with text_llm(with_text) as llm:
        assert len(llm.generate(["In the"], greedy(4))[0].outputs[0].token_ids) == 4
        with pytest.raises(ConfigError, match="--chat-template"):
            llm.chat([{"role": "user", "content": "In the"}], greedy(4))


def test_r127_both_places_of_a_chat_template(with_text: Path) -> None:
    template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    config = {"bos_token": small_tokenizers.BOS, "eos_token": small_tokenizers.EOS}
    found = []
    for in_config in (True, False):
        small_tokenizers.save(with_text, config | ({"chat_template": template} if in_config else {}))
        if not in_config:
            (with_text / "chat_template.jinja").write_text(template)
        with text_llm(with_text) as llm:
            found.append(llm.chat([{"role": "user", "content": "In the"}], greedy(4))[0])
    assert found[0].prompt == found[1].prompt == "<|user|>In the"
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
