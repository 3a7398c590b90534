"""The emulated link that options ask for. Knows nothing of the transfers over it."""

from __future__ import annotations

import math

from hocket.config.engine import EmulatedLink
from hocket.config.options import Options
from hocket.errors import ConfigError

ALONE = "without enable_expert_parallel and data_parallel_size over 1"


def emulated_link(options: Options, shared: bool) -> EmulatedLink | None:
    """None: transfers are not stretched. shared: whether experts are spread over ranks.

    Raises:
        ConfigError: options of a link without one, or a link where nothing is sent.
    """
    gb_per_s, latency_us, token_bytes = (
        options.emulate_link_gb_per_s,
        options.emulate_link_latency_us,
        options.emulate_link_token_bytes,
    )
    if gb_per_s is None:
        if latency_us:
            raise ConfigError("emulate_link_latency_us", latency_us, "0", where="without emulate_link_gb_per_s")
        if token_bytes is not None:
            where = "without emulate_link_gb_per_s"
            raise ConfigError("emulate_link_token_bytes", token_bytes, "not to give it", where=where)
        return None
    if not shared:
        raise ConfigError("emulate_link_gb_per_s", gb_per_s, "not to give it", where=ALONE)
    return EmulatedLink(gb_per_s=gb_per_s, latency_us=latency_us, token_bytes=_token_bytes(token_bytes))


def _token_bytes(text: str | None) -> tuple[float, float] | None:
    """`29568,57344` as bytes of a token's dispatch and of its combine."""
    if text is None:
        return None
    try:
        out, back = (float(part) for part in text.split(","))
    except ValueError:
        out = back = -1.0
    if not (0 <= out < math.inf and 0 <= back < math.inf):
        raise ConfigError("emulate_link_token_bytes", text, "two numbers of bytes, as 29568,57344")
    return out, back
