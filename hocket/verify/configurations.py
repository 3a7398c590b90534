"""Which configurations a verification compares. Knows options, and nothing of how they are run. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hocket.bench.overlap import check_ranks, refuse_forced_split
from hocket.config.backends import NCCL_TRANSPORTS
from hocket.config.options import Options
from hocket.config.resolve import resolve
from hocket.errors import BackendUnavailable, ConfigError
from hocket.verify.compare import EPS
from hocket.verify.workload import Workload

NUM_UBATCHES = (2, 3)
_STEP_SHARE = 2 / 3


@dataclass(frozen=True)
class Configuration:
    """One way to run the prompts. is_restarted: on ranks that were started anew for it (or for the one before, which
    is restarted too). is_reversed: the last prompt comes first, so that others share their steps."""

    options: Options
    transport: str
    num_ubatches: int
    is_restarted: bool = False
    is_reversed: bool = False

    @property
    def name(self) -> str:
        """`2 ubatches, torch, restarted`."""
        parts = "overlap off" if self.num_ubatches == 1 else f"{self.num_ubatches} ubatches"
        return (
            f"{parts}, {self.transport}" + ", restarted" * self.is_restarted + ", prompts reversed" * self.is_reversed
        )


def configurations(options: Options, work: Workload) -> tuple[list[Configuration], list[str]]:
    """Overlap off, then each number of ubatches, on each transport; at last off and the fewest ubatches once more, on
    new ranks. All others are compared with the first. In half precision the second is the first with the prompts
    reversed, which tells how much the dtype alone changes. Besides, why transports were left out that cannot run here.

    Thresholds are as low as can be, and a step holds less than the longest prompt unless options say otherwise.

    Raises:
        ConfigError: the options leave nothing to compare, or contradict each other.
    """
    where = "in hocket verify"
    check_ranks(options, where)
    base = replace(
        options,
        enable_dbo=False,
        ubatch_size=0,
        max_num_batched_tokens=options.max_num_batched_tokens or _step_tokens(options, work),
        skip_tokenizer_init=options.skip_tokenizer_init or work.prompts_file is None,
    )
    refuse_forced_split(base, f"{where}, which decides what is split")
    config = resolve(base)
    first = config.parallel.all2all_backend
    transports = [first]
    if options.all2all_backend == "auto":
        transports += [name for name in NCCL_TRANSPORTS if name != first]
    sizes = sorted({*NUM_UBATCHES, options.ubatch_size} - {0, 1})
    made: list[Configuration] = []
    skipped: list[str] = []
    for transport in transports:
        some = [_one(base, transport, size) for size in (1, *sizes)]
        try:
            for one in some:
                resolve(one.options)
        except BackendUnavailable as error:
            if transport == first:
                raise
            skipped.append(str(error))
        else:
            made += some
    noise = [replace(made[0], is_reversed=True)] * (config.dtype in EPS and not config.deterministic)
    return [made[0], *noise, *made[1:], *(replace(one, is_restarted=True) for one in made[:2])], skipped


def _one(base: Options, transport: str, num_ubatches: int) -> Configuration:
    options = replace(base, all2all_backend=transport)
    if num_ubatches > 1:
        options = replace(
            options,
            ubatch_size=num_ubatches,
            dbo_decode_token_threshold=num_ubatches,
            dbo_prefill_token_threshold=num_ubatches,
        )
    return Configuration(options, transport, num_ubatches)


def _step_tokens(options: Options, work: Workload) -> int | None:
    """So few that the longest prompt takes several steps, and no fewer than may run at once."""
    if not options.enable_chunked_prefill or work.prompts_file is not None:
        return None
    return max(round(_STEP_SHARE * work.prompt_len), options.max_num_seqs or 1, max(NUM_UBATCHES))


def check_prompts(prompts: Sequence[object], options: Options) -> None:
    """Raise ConfigError where some rank would have nothing to do."""
    if len(prompts) < options.data_parallel_size:
        allowed = f"at least {options.data_parallel_size}, one for each rank"
        raise ConfigError("num_prompts", len(prompts), allowed)
