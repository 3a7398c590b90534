"""Prints an explanation for people, at most 100 columns wide. Knows only its plain values; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hocket.doctor.show import GIB, Row, cache_text, print_rows, traits_text
from hocket.envs import DBO_COMM_SMS, FORCE_SPLIT
from hocket.explain.order import by_schedule, picture

_MIB, _KIB = 1 << 20, 1 << 10


def show(found: dict[str, Any], console: Console) -> None:
    """Print `found`, what `describe` gives."""
    print_rows(console, "Model", _model(found))
    print_rows(console, "Ranks", _ranks(found))
    if found["messages"]["transports"]:
        _print_messages(console, found)
    print_rows(console, "Memory of a rank", _memory(found))
    print_rows(console, "Overlap", _overlap(found))
    if "steps" in found:
        _print_steps(console, found["steps"], bool(found["graphs"]["sizes"]))
    if _can_split(found):
        _print_order(console, found["schedules"])
    if found["options"]:
        _print_options(console, found["options"])
    for one in found["refused"]:
        console.print(Text(f"✗ refused, and left out of the above: {one['why']}", style="red"))


def _table(*columns: str) -> Table:
    """Without lines, its head dim."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _print_table(console: Console, title: str, table: Table, *after: str) -> None:
    console.print(Text(title, style="bold"))
    console.print(table)
    for line in after:
        console.print(Text(line))
    console.print()


def _model(found: dict[str, Any]) -> Iterator[Row]:
    model, experts = found["model"], found["experts"]
    fp8 = f"; published in fp8, blocks of {' × '.join(map(str, model['fp8_blocks']))}" if model["fp8_blocks"] else ""
    yield "path", f"{model['path']} ({model['type']}, {model['dtype']}{fp8})"
    yield "layers", f"{model['layers']}, {model['sparse_layers']} of them sparse; {model['hidden_size']:,} wide"
    if model["latent_dim"]:
        heads = f"{model['heads']} heads over latents of {model['latent_dim']}"
    else:
        heads = f"{model['heads']} heads of {model['head_dim']}, {model['kv_heads']} for keys and values"
    yield "attention", heads
    shared = f", {experts['shared']} shared" if experts["shared"] else ""
    width = f"{model['expert_width']:,} wide (dense layers {model['dense_width']:,})"
    yield "experts", f"{experts['total']}, {experts['per_token']} per token{shared}; {width}"
    yield "vocabulary", f"{model['vocabulary']:,}"


def _ranks(found: dict[str, Any]) -> Iterator[Row]:
    by_rank = found["experts"]["by_rank"]
    counts = " / ".join(str(count) for count in dict.fromkeys(by_rank))
    apart = len(by_rank) == 1 and found["ranks"] > 1
    yield "ranks", f"{found['ranks']} on {found['device']}{', each a replica with all experts' if apart else ''}"
    if found["assumed_gpus"] is not None:
        yield "", f"GPUs here: {found['gpus_here']}; told as if there were {found['assumed_gpus']}, one for each rank"
    yield "experts", f"{counts} on each of {len(by_rank)} rank{'s' * (len(by_rank) > 1)}"
    link = found["emulated_link"]
    stretched = ""
    if link is not None:
        stretched = f", stretched to {link['gb_per_s']:g} GB/s + {link['latency_us']:g} µs (emulated)"
        if link["token_bytes"] is not None:
            out, back = link["token_bytes"]
            stretched += f" as if a token took {out:,.0f} bytes out and {back:,.0f} back"
    yield "transport", f"{found['transport']}{stretched}"
    yield "", traits_text(found["transport_traits"])
    for kind, one in found["backends"].items():
        yield kind, f"{one['name']} ({one['why']})" if one["why"] else one["name"]
    limits = found["limits"]
    tokens, seqs = limits["max_num_batched_tokens"], limits["max_num_seqs"]
    yield "a step", f"at most {tokens:,} tokens and {seqs:,} requests of up to {limits['max_model_len']:,} tokens"
    sizes, uncapturable = found["graphs"]["sizes"], found["graphs"]["uncapturable"]
    if sizes and uncapturable:
        yield "graphs", f"none: {' and '.join(uncapturable)} cannot be captured"
    elif sizes:
        yield "graphs", f"of decode steps of {', '.join(map(str, sizes))} requests ({len(sizes)} to capture at start)"
        if split := found["graphs"]["split_sizes"]:
            yield "", f"and as {found['num_ubatches']} ubatches from {split[0]} on ({len(split)} more)"
    else:
        yield "graphs", "none"


def _print_messages(console: Console, found: dict[str, Any]) -> None:
    layers, most = found["model"]["sparse_layers"], found["limits"]["max_num_batched_tokens"]
    table = _table("transport", "dispatch", "combine", "both, all layers", f"a step of {most:,} tokens")
    for one in found["messages"]["transports"]:
        both = (one["dispatch_bytes"] + one["combine_bytes"]) * layers
        name = f"{one['name']} ← chosen" if one["is_chosen"] else one["name"]
        sizes = [*map(_size, (one["dispatch_bytes"], one["combine_bytes"], both, both * most))]
        sizes[0] += " in fp8" * one["is_fp8"]
        table.add_row(name, *sizes)
    note = (
        "What a rank sends to others: for one of its tokens in one sparse layer, in all of them, in its largest step. "
        f"torch: the mean of {found['messages']['sample_tokens']} tokens that choose experts at random."
    )
    if found["device"] != "cpu":
        note += " DeepEP's: the same; low_latency is for decodes, high_throughput for prefills."
    if any(one["is_fp8"] for one in found["messages"]["transports"]):
        note += " In fp8, with scales, where experts are (Hopper, DeepGEMM); elsewhere in the model's dtype."
    _print_table(console, "Messages", table, note)


def _memory(found: dict[str, Any]) -> Iterator[Row]:
    memory, limits = found["memory"], found["limits"]
    weights, fp8 = _size(memory["weights_bytes"]), memory["weights_fp8_bytes"]
    yield "weights", f"{_size(fp8)} where fp8 runs (Hopper, DeepGEMM), else {weights}" if fp8 else weights
    block = f"{_size(memory['kv_bytes_per_block'])} per block of {limits['block_size']}"
    yield "KV", f"{_size(memory['kv_bytes_per_token'])} per token, {block}, all layers together"
    for one in memory["buffers"]:
        yield "buffers", f"{one['what']}: {_size(one['bytes'])}, as much as {one['kv_blocks']:,} KV blocks"
    if memory["free_bytes"] is None:
        yield "KV cache", "a share of what is left; --memory-gib says how much memory there would be"
        return
    source = "given" if memory["is_given"] else "free here now"
    yield "memory", f"{_size(memory['free_bytes'])} for each rank ({source})"
    less = ", less a step's own memory" if found["device"] == "cuda" else ""
    room = f"no room: {memory['problem']}" if memory["problem"] else cache_text(memory, limits, less)
    yield "KV cache", room


def _overlap(found: dict[str, Any]) -> Iterator[Row]:
    if found["num_ubatches"] == 1:
        yield "off", "every step runs whole (--enable-dbo splits steps in two ubatches)"
        return
    forced = f", every step: {FORCE_SPLIT.name} is set" if found["is_forced"] else ""
    yield "on", f"{found['num_ubatches']} ubatches take turns ({found['executor']}){forced}"
    if found["device"] != "cpu":
        yield "SMs", _sms(found["sms"])
    for phase, runs in found["splits"].items():
        what = "steps of decodes only" if phase == "decode" else "steps with prompt tokens"
        sizes = ", ".join(f"{run['tokens'][0]}–{run['tokens'][1]}: {run['reason']}" for run in runs)
        yield phase, f"{what}, tokens per rank {sizes}"
    if not _can_split(found):
        yield "", "no step can be split: lower the thresholds, or raise --max-num-batched-tokens or --max-num-seqs"


def _sms(sms: dict[str, Any]) -> str:
    if sms["comm"] == 0:
        return f"not divided: these transfers take none, or {DBO_COMM_SMS.name} is 0"
    how = "in a green context" if sms["green_context"] else "as far as its kernels can be told"
    return f"transfers take at most {sms['comm']} of a GPU's ({DBO_COMM_SMS.name}), compute the others, {how}"


def _can_split(found: dict[str, Any]) -> bool:
    runs = (run for phase in found.get("splits", {}).values() for run in phase)
    return any(run["reason"] == "split" for run in runs)


def _print_steps(console: Console, steps: Iterable[dict[str, Any]], with_graphs: bool) -> None:
    table = _table("step", "tokens by rank", "becomes", *["graph"] * with_graphs, "why")
    for one in steps:
        became = " + ".join(map(str, one["ubatches"])) or one["reason"]
        graph = [f"of {one['graph_tokens']}" if one["graph_tokens"] else one["graph"]] * with_graphs
        what = one["phase"] if one["what"] == "all ranks alike" else f"{one['phase']}, {one['what']}"
        table.add_row(what, _tokens(one["tokens"]), became, *graph, one["why"])
    _print_table(console, "Steps, as the ranks would vote", table)


def _tokens(by_rank: list[int]) -> str:
    """`8 each`, or `8 8 8 1`; of many ranks those that differ."""
    if len(by_rank) > 1 and len(set(by_rank)) == 1:
        return f"{by_rank[0]:,} each"
    if len(by_rank) <= 4:
        return " ".join(map(str, by_rank))
    return f"{by_rank[0]} on {len(by_rank) - 1}, {by_rank[-1]}"


def _print_order(console: Console, schedules: dict[str, Any]) -> None:
    for name, phases in by_schedule(schedules).items():
        console.print(Text(f"One sparse layer in {' and '.join(phases)} ({name})", style="bold"))
        for line in picture(schedules[phases[0]]):
            console.print(Text(line), soft_wrap=True)
    console.print(
        Text(
            "A0 qkv projection, A1 attention and router, D dispatch, M experts, C combine, S shared experts;\n"
            "the number: the ubatch; ⁺: of the next layer. Each transfer runs under the compute above it."
        )
    )
    console.print()


def _print_options(console: Console, options: Iterable[dict[str, Any]]) -> None:
    table = _table("option", "given", "became", "why")
    for one in options:
        given = "not given" if one["given"] is None else str(one["given"])
        became = "no effect" if one["became"] is None else str(one["became"])
        table.add_row(one["option"], given, became, one["why"])
    _print_table(console, "Options that became something else, or nothing", table)


def _size(num_bytes: float) -> str:
    for unit, name in ((GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes:,.0f} bytes"
