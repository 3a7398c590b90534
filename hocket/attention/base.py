"""What attention must know of a step's requests, and how each fact is cut into ubatches. Knows no backend or model.

Legend: T tokens of the step (padding included), R requests, B blocks of the longest request.
"""

# ruff: noqa: RUF009 (sliced() makes a dataclass field)
from __future__ import annotations

import inspect
from dataclasses import Field, dataclass, field
from typing import Any

from torch import Tensor

SLICING_RULES = ("tokens", "tokens_last", "requests", "shared", "rebuilt")


def sliced(rule: str) -> Any:
    """A dataclass field with its slicing rule.

    tokens: cut along the token axis, the first; tokens_last: it is the last. requests: cut along the request axis,
    the first (where a request is cut, its entry is recomputed on a copy). Of a mapping or a tuple of tensors each part
    is cut; None stays None. shared: the same object for all ubatches. rebuilt: recomputed for each ubatch.
    """
    if rule not in SLICING_RULES:
        raise TypeError(f"slicing rule {rule!r}; one of {', '.join(SLICING_RULES)}")
    return field(metadata={"sliced": rule})


class Sliceable:
    """Base of per-step data: a subclass whose annotated field has no slicing rule cannot be defined."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in inspect.get_annotations(cls):
            value = cls.__dict__.get(name)
            if not isinstance(value, Field) or "sliced" not in value.metadata:
                raise TypeError(f"{cls.__name__}.{name} has no slicing rule: write `= sliced(...)`")

    @classmethod
    def slicing_rules(cls) -> dict[str, str]:
        """Field name → rule, in order of declaration."""
        declared: dict[str, Field[Any]] = cls.__dict__["__dataclass_fields__"]
        return {name: str(value.metadata["sliced"]) for name, value in declared.items()}


@dataclass(frozen=True, kw_only=True)
class AttentionMetadata(Sliceable):
    """Which rows belong to which request, and where its keys and values lie.

    query_start_loc: int32 [R + 1], first row of each request; rows of requests are contiguous, padding rows come last.
    seq_lens: int32 [R], tokens of each request's context, this step's included.
    block_table: int32 [R, B], cache blocks of each request; entries past its last block are never read.
    slot_mapping: int64 [T], where each row's key and value go (block × block_size + offset); −1: nowhere.
    block_table_cpu: the same on the host. Other *_cpu: the same as Python integers. max_*: largest over requests.
    num_tokens: rows that are not padding.
    """

    query_start_loc: Tensor = sliced("rebuilt")
    seq_lens: Tensor = sliced("requests")
    block_table: Tensor = sliced("requests")
    block_table_cpu: Tensor = sliced("requests")
    slot_mapping: Tensor = sliced("tokens")
    query_start_loc_cpu: tuple[int, ...] = sliced("rebuilt")
    seq_lens_cpu: tuple[int, ...] = sliced("requests")
    max_query_len: int = sliced("rebuilt")
    max_seq_len: int = sliced("rebuilt")
    num_tokens: int = sliced("rebuilt")
