"""Prints an examination for people, at most 100 columns wide. Knows only its plain values; torch-free."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MAX_WIDTH = 100
GIB = 1 << 30
Row = tuple[str, str]


def show(report: dict[str, Any], console: Console) -> None:
    """Print `report`, what `examine` gives."""
    print_rows(console, "Software", _software(report))
    print_rows(console, "Hardware", _hardware(report))
    print_rows(console, "Links", _links(report["links"]))
    if report["backends"]:
        _print_backends(console, report["backends"])
    if report["config"] is not None:
        print_rows(console, "What would run", _choice(report["config"], report["choice"]))
    for problem in report["problems"]:
        console.print(Text(f"✗ {problem}", style="red"))
    if not report["problems"]:
        console.print(Text("✓ everything that is needed is here", style="green"))


def console(*, file: Any = None) -> Console:
    """Of the terminal's width, but at most MAX_WIDTH columns; where there is no terminal, that wide."""
    found = Console(file=file, highlight=False, soft_wrap=False)
    found.width = min(found.width, MAX_WIDTH) if found.is_terminal else MAX_WIDTH
    return found


def print_rows(console: Console, title: str, rows: Iterable[Row]) -> None:
    """A titled section of named lines."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(width=10, style="cyan")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


def _print_backends(console: Console, backends: list[dict[str, Any]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(width=10, style="cyan")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for kind, group in itertools.groupby(backends, key=lambda backend: backend["kind"]):
        for number, one in enumerate(group):
            state = Text("✓ available", "green") if one["available"] else Text(f"✗ {one['reason']}", "red")
            if "traits" in one:
                state.append(f": {traits_text(one['traits'])}", "dim")
            table.add_row(kind if number == 0 else "", one["name"], state)
    console.print(Text("Backends", style="bold"))
    console.print(table)
    console.print()


def traits_text(traits: dict[str, Any]) -> str:
    """What `traits` of a transport come to on a GPU."""
    most = traits["max_sms"]
    sms = "SMs as NCCL likes" if most is None else f"at most {most} SMs" if most else "no SMs"
    apart = "apart" if traits["is_apart"] else "together"
    blocks = "the host waits to send" if traits["launch_blocks"] else "sent without waiting"
    graphs = "in CUDA graphs" if traits["captures"] else "not in CUDA graphs"
    return f"{sms}, send and receive {apart}, {blocks}, {graphs}"


def _software(report: dict[str, Any]) -> Iterator[Row]:
    versions, packages = report["versions"], report["packages"]
    yield "hocket", f"{report['hocket']}, Python {report['python']}"
    cuda = f"CUDA {versions['cuda']}" if versions.get("cuda") else "without CUDA"
    nccl = f", NCCL {versions['nccl']}" if versions.get("nccl") else ""
    yield "torch", f"{versions['torch']}, {cuda}{nccl}" if versions else str(packages["torch"])
    yield "driver", report["driver"] or "no NVIDIA driver"
    others = (f"{name} {version or '(not installed)'}" for name, version in packages.items() if name != "torch")
    yield "packages", ", ".join(others)
    if caches := report["kernel_caches"]:
        yield "compiled", ", ".join(f"{name} keeps it in {folder}" for name, folder in caches.items())


def _hardware(report: dict[str, Any]) -> Iterator[Row]:
    cpu, memory = report["cpu"], report["memory_bytes"]
    yield "cpu", f"{cpu['threads']} threads of {cpu['name']}"
    yield "memory", "unknown" if memory is None else f"{memory / GIB:.1f} GiB free for this process and what it starts"
    for number, gpu in enumerate(report["gpus"]):
        yield (
            f"gpu {number}",
            f"{gpu['name']}, {gpu['memory_bytes'] / GIB:.0f} GiB ({gpu['free_bytes'] / GIB:.0f} free), "
            f"{gpu['num_sms']} SMs, compute capability {gpu['compute_capability']}",
        )
    if not report["gpus"]:
        on_cpu = report["config"] is not None and report["config"]["device"] == "cpu"
        yield "gpus", "none used" if on_cpu else "none found"


def _links(links: dict[str, Any] | None) -> Iterator[Row]:
    if links is None:
        yield "", "not measured"
    elif links["kind"] == "none":
        yield "", "one GPU: nothing to measure"
    else:
        yield from _copies(links["copies"])
        for one in links["collectives"]:
            yield one["op"], f"{links['kind']}, {one['ranks']} ranks, {_figures([one])}"


def _copies(copies: list[dict[str, Any]]) -> Iterator[Row]:
    """Pairs that are joined alike are one line for each size."""

    def alike(one: dict[str, Any]) -> tuple[Any, ...]:
        return str(one["link"]), one["peer_access"], one["bytes"]

    for (link, peer_access, _), group in itertools.groupby(sorted(copies, key=alike), key=alike):
        found = list(group)
        how = "direct" if peer_access else "through the host"
        pairs = ", ".join(f"{one['from']}→{one['to']}" for one in found)
        pairs = pairs if len(found) <= 4 else f"{len(found)} pairs"
        yield "copy", f"{pairs}, {_link_name(link)}, {how}, {_figures(found)}"


def _link_name(link: str) -> str:
    if link.startswith("NV"):
        return f"NVLink × {link[2:]}"
    return "link unknown" if link == "None" else f"PCIe ({link})"


def _figures(found: list[dict[str, Any]]) -> str:
    """Size, time and bandwidth of measurements of one size: the median, of several the least and the greatest."""
    us = [one["us"]["median"] for one in found]
    gb_per_s = [one["gb_per_s"] for one in found]
    return f"{_size(found[0]['bytes'])}: {_range(us, 1)} µs, {_range(gb_per_s, 2)} GB/s"


def _range(values: list[float], digits: int) -> str:
    least, most = (f"{value:,.{digits}f}" for value in (min(values), max(values)))
    return least if least == most else f"{least} – {most}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):g} MiB" if num_bytes >= 1 << 20 else f"{num_bytes / (1 << 10):g} KiB"


def _choice(config: dict[str, Any], choice: dict[str, Any] | None) -> Iterator[Row]:
    ranks = config["ranks"]
    spread = "" if config["experts_over"] == 1 else f", experts over {config['experts_over']}"
    yield "model", f"{config['model']} ({config['model_type']}, {config['dtype']})"
    yield "ranks", f"{ranks} on {config['device']}{spread}; transport {config['transport']}"
    overlap = "off" if config["executor"] is None else f"{config['num_ubatches']} ubatches, {config['executor']}"
    yield "overlap", overlap
    if config["graph_sizes"]:
        sizes, split = config["graph_sizes"], config["split_graph_sizes"]
        also = f", {len(split)} also as ubatches" if split else ""
        which = f"for decode steps, {len(sizes)} sizes to {sizes[-1]} tokens{also}"
        yield "graphs", f"{which}, if all backends can be captured"
    if choice is None or "experts" not in choice:
        return
    yield "backends", f"attention {choice['attention']}, experts {choice['experts']}, kernels {choice['kernels']}"
    yield "weights", f"{choice['weights_bytes'] / GIB:.2f} GiB a rank, of {choice['free_bytes'] / GIB:.2f} GiB free"
    if choice["cache_blocks"] == 0:
        yield "KV cache", "no room for one request"
        return
    less = ", less a step's own memory" if config["device"] == "cuda" else ""
    yield "KV cache", cache_text(choice, config, less)


def cache_text(found: dict[str, Any], limits: dict[str, Any], less: str) -> str:
    """found: {cache_blocks, cache_bytes} of a rank. limits: {block_size, max_model_len, max_num_seqs}. less: what goes
    off."""
    tokens = found["cache_blocks"] * limits["block_size"]
    full = tokens // limits["max_model_len"]
    return (
        f"{found['cache_bytes'] / GIB:.2f} GiB a rank{less}: {found['cache_blocks']:,} blocks, {tokens:,} tokens, "
        f"{full} requests of {limits['max_model_len']:,} tokens (at most {limits['max_num_seqs']} run at once)"
    )
