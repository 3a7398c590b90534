"""Faults of dual batch overlap to plant in running ranks. For tests only; ranks call `install` at their start.

A plant changes one engine, and modules only through `mocked`, which the next engine undoes. Unless said otherwise the
fault does nothing in steps that are not split.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import faults
import torch
from faults import Plant, model_of
from model_faults import moe_layers
from overlap_transfer_faults import MOCKS, TRANSFER_FAULTS, late_events, mocked, receive_apart, ubatch_idx
from torch import Tensor

from hocket.attention.plan import Plan
from hocket.engine import Engine
from hocket.models.base import UBatchInputs
from hocket.overlap import veto, views
from hocket.overlap.slices import UBatchSlice
from hocket.scheduler.batch import Batch

Parts = tuple[UBatchInputs, ...]


# -- metadata of a ubatch -------------------------------------------------------------------------------------------


def reslice(change: Callable[[Any, UBatchSlice, Any], Any]) -> Plant:
    """Every ubatch's attention metadata becomes `change(the batch's, slice, the right one)`."""

    def plant(engine: Engine) -> None:
        real = views.slice_attention
        mocked(views, "slice_attention", lambda meta, part: change(meta, part, real(meta, part)))

    return plant


def keep_seq_lens(meta: Any, part: UBatchSlice, right: Any) -> Any:
    """The tokens that the last request has in later ubatches are not taken off."""
    rows = slice(part.request_start, part.request_stop)
    return dataclasses.replace(right, seq_lens=meta.seq_lens[rows], seq_lens_cpu=meta.seq_lens_cpu[rows])


def correct_seq_lens_in_place(meta: Any, part: UBatchSlice, right: Any) -> Any:
    """The correction for one ubatch is still there when the next one is cut."""
    rows = slice(part.request_start, part.request_stop)
    meta.seq_lens[rows] = right.seq_lens
    seq_lens = list(meta.seq_lens_cpu)
    seq_lens[rows] = right.seq_lens_cpu
    object.__setattr__(meta, "seq_lens_cpu", tuple(seq_lens))
    return right


def keep_query_start(meta: Any, part: UBatchSlice, right: Any) -> Any:
    """Starts count from the batch's first row, not from the ubatch's."""
    starts = tuple(start + part.token_start for start in right.query_start_loc_cpu)
    tensor = torch.tensor(starts, dtype=torch.int32)
    return dataclasses.replace(right, query_start_loc=tensor, query_start_loc_cpu=starts)


def first_slots(meta: Any, part: UBatchSlice, right: Any) -> Any:
    return dataclasses.replace(right, slot_mapping=meta.slot_mapping[: part.num_tokens])


def first_blocks(meta: Any, part: UBatchSlice, right: Any) -> Any:
    return dataclasses.replace(right, block_table=meta.block_table[: part.num_requests])


def change_parts(change: Callable[[Engine, Parts], Parts]) -> Plant:
    """The ubatches' inputs become `change(engine, the right ones)`."""

    def plant(engine: Engine) -> None:
        runner: Any = engine.runner
        prepare = runner.prepare

        def changed(*args: Any) -> Parts:
            parts = prepare(*args)
            return change(engine, parts) if len(parts) > 1 else parts

        runner.prepare = changed

    return plant


def first_rows_of(field: str) -> Plant:
    """Every ubatch gets the rows of the first one, as far as there are any."""

    def change(engine: Engine, parts: Parts) -> Parts:
        whole = torch.cat([getattr(part, field) for part in parts])
        rows: list[Any] = [whole[: len(getattr(part, field))] for part in parts]
        return tuple(dataclasses.replace(part, **{field: own}) for part, own in zip(parts, rows, strict=True))

    return change_parts(change)


def pad_as_the_whole_batch(engine: Engine, parts: Parts) -> Parts:
    """On rank 1 the layout of each ubatch says the padded size of the whole batch."""
    if engine.mesh.rank == 0:
        return parts
    most = sum(part.layout.num_padded_max for part in parts)
    return tuple(dataclasses.replace(p, layout=dataclasses.replace(p.layout, num_padded_max=most)) for p in parts)


def cut_elsewhere_on_rank_1(engine: Engine) -> None:
    prepare = engine.runner.prepare

    def shifted(batch: Batch, plan: Any, *args: Any) -> Parts:
        if engine.mesh.rank == 1 and len(plan.bounds) > 1:
            plan = dataclasses.replace(plan, bounds=(plan.bounds[0] - 1, *plan.bounds[1:]))
        return prepare(batch, plan, *args)

    engine.runner.prepare = shifted  # type: ignore[method-assign]


# -- decisions ------------------------------------------------------------------------------------------------------


def policy(**changes: Any) -> Plant:
    """All ranks decide by another policy."""

    def plant(engine: Engine) -> None:
        engine.config = dataclasses.replace(
            engine.config, overlap=dataclasses.replace(engine.config.overlap, **changes)
        )

    return plant


def readers_first(engine: Engine) -> None:
    """Requests stand in reversed order, so those that read blocks of the step before those that write them. (Not a
    fault: such steps are not split.)"""
    schedule = engine.scheduler.schedule

    def reversed_order(*args: Any, **kwargs: Any) -> Batch:
        batch = schedule(*args, **kwargs)
        return dataclasses.replace(batch, requests=batch.requests[::-1])

    engine.scheduler.schedule = reversed_order  # type: ignore[method-assign]


def no_veto(engine: Engine) -> None:
    readers_first(engine)
    mocked(veto, "has_hazard", lambda *_, **__: False)


# -- executing ------------------------------------------------------------------------------------------------------


def change_run(change: Callable[[Callable[..., list[Any]], Parts, Any], list[Any]]) -> Plant:
    """Split steps are run by `change(the right run, ubatches, KV caches)`."""

    def plant(engine: Engine) -> None:
        executor: Any = engine.runner.executor
        run = executor.run

        def changed(parts: Parts, caches: Any, phase: str) -> list[Any]:
            in_phase = functools.partial(run, phase=phase)
            return change(in_phase, parts, caches) if len(parts) > 1 else in_phase(parts, caches)

        executor.run = changed

    return plant


def last_first(run: Callable[..., list[Any]], parts: Parts, caches: Any) -> list[Any]:
    """Later ubatches lead: they attend before the earlier ones have written."""
    return run(parts[::-1], caches)[::-1]


def skip_empty_ubatches(engine: Engine) -> None:
    """A ubatch without tokens returns at once."""
    model: Any = engine.runner.model
    forward = model.forward

    def early(inputs: UBatchInputs, caches: list[Tensor]) -> Tensor:
        if ubatch_idx() is not None and not len(inputs.token_ids):
            return torch.empty(0, engine.config.model.hidden_size)
        out: Tensor = forward(inputs, caches)
        return out

    model.forward = early


def one_plan_for_all(engine: Engine) -> None:
    """The attention plan of the first ubatch of a step is kept, and the others take it for theirs."""
    kept: list[Any] = []

    def replace_plan(_layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        [at] = [i for i, arg in enumerate(args) if isinstance(arg, Plan)]
        if not ubatch_idx():
            kept[:] = [args[at]]
        return *args[:at], kept[0], *args[at + 1 :]

    for layer in engine.runner.model.layers:
        layer.register_forward_pre_hook(replace_plan)


def lose_shared_experts(engine: Engine) -> None:
    """The second ubatch goes without shared experts."""
    for layer in moe_layers(model_of(engine)):
        shared = layer.shared_experts
        assert shared is not None
        shared.register_forward_hook(lambda _module, _args, out: out * 0 if ubatch_idx() == 1 else out)


OVERLAP_FAULTS: dict[str, Plant] = {
    "seq_lens not corrected": reslice(keep_seq_lens),
    "seq_lens corrected in place": reslice(correct_seq_lens_in_place),
    "query_start_loc not re-based": reslice(keep_query_start),
    "slots of the first ubatch": reslice(first_slots),
    "block tables of the first ubatch": reslice(first_blocks),
    "positions of the first ubatch": first_rows_of("positions"),
    "tokens of the first ubatch": first_rows_of("token_ids"),
    "padded as the whole batch on one rank": change_parts(pad_as_the_whole_batch),
    "cut elsewhere on one rank": cut_elsewhere_on_rank_1,
    "never split": policy(num_ubatches=1),
    "thresholds ignored": policy(force_split=True),
    "reader before writer": no_veto,
    "results in another order": change_run(lambda run, parts, caches: run(parts, caches)[::-1]),
    "later ubatches lead": change_run(last_first),
    "empty ubatches return early": skip_empty_ubatches,
    "one attention plan for all": one_plan_for_all,
    "shared experts of the second ubatch lost": lose_shared_experts,
    **TRANSFER_FAULTS,
}
HARMLESS: dict[str, Plant] = {
    "readers first": readers_first,
    "receive apart": receive_apart,
    "events recorded after the hand-over": late_events,
}
"""They change no answer."""


def install() -> None:
    """As `faults.install`, with what is here."""
    faults.install_from(OVERLAP_FAULTS | HARMLESS, before=MOCKS.close)
