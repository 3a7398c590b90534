"""Which tokens may come next where an output must be JSON of a schema. Knows no logits and no requests in flight.

The work is llguidance's (an optional package): it turns a schema and a tokenizer into masks over the vocabulary.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hocket.errors import BackendUnavailable, ConfigError
from hocket.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_BYTES = 2**16
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,16}"
"""Between JSON's parts. Bounded: small models may like nothing better than one more space."""
_MAX_GRAMMAR = 20_000
_LEXER_FUEL = 300_000
"""Steps in building a grammar and its lexer: about 0.1 s at most."""
_MAX_CHECKED = 1024
_FIELD = "json_schema"


class Grammars:
    """Grammars over one model's vocabulary. Thread-safe.

    vocab_size: of the model's logits, which may be more than the tokenizer has.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._lock = threading.Lock()
        self._known: dict[tuple[int, ...], LLTokenizer] = {}
        self._checked: dict[tuple[str, tuple[int, ...]], None] = {}

    def check(self, schema: str, eos_token_ids: Sequence[int]) -> None:
        """Raise ConfigError for a schema that is wrong, not supported, or too large to be followed quickly.

        A schema that was right is remembered.

        Raises:
            BackendUnavailable: llguidance is not installed.
        """
        key = schema, tuple(eos_token_ids)
        if key in self._checked:
            return
        if len(schema.encode()) > MAX_SCHEMA_BYTES:
            raise ConfigError(_FIELD, schema, f"a schema of at most {MAX_SCHEMA_BYTES} bytes")
        try:
            matcher = self._matcher(schema, eos_token_ids)
            problem = matcher.get_error() if matcher.is_error() else ""
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if problem:
            raise ConfigError(_FIELD, schema, f"a JSON schema that can be followed ({problem})")
        with self._lock:
            while len(self._checked) >= _MAX_CHECKED:
                del self._checked[next(iter(self._checked))]
            self._checked[key] = None

    def follow(self, schema: str, eos_token_ids: Sequence[int]) -> Follower:
        """What follows a schema along one output."""
        return Follower(self._matcher(schema, eos_token_ids))

    def _matcher(self, schema: str, eos_token_ids: Sequence[int]) -> LLMatcher:
        library = _library()
        grammar = library.LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE})
        limits = library.LLParserLimits(max_grammar_size=_MAX_GRAMMAR, initial_lexer_fuel=_LEXER_FUEL)
        matcher: LLMatcher = library.LLMatcher(self._of(tuple(eos_token_ids)), grammar, log_level=0, limits=limits)
        return matcher

    def _of(self, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
        """The tokenizer as llguidance needs it: made once, which takes about a second where it is large."""
        with self._lock:
            if eos_token_ids not in self._known:
                text = self._tokenizer.backend.to_str()
                eos = list(eos_token_ids) or None
                made = _library().LLTokenizer(text, n_vocab=self._vocab_size, eos_token=eos)
                self._known[eos_token_ids] = made
            return self._known[eos_token_ids]


class Follower:
    """Where an output is in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_tokens = 0
        """Tokens of the output taken so far."""

    def allowed(self, new_token_ids: Sequence[int], vocab_size: int) -> np.ndarray:
        """Take tokens, and say which may come next: bool [vocab_size]. Where the output has left the grammar or the
        grammar became too costly to follow: only those that end it."""
        import numpy as np  # where it is needed, which in the front it never is

        self.num_tokens += len(new_token_ids)
        if new_token_ids and not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(new_token_ids))
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        found = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(bool)
        return np.pad(found, (0, vocab_size - len(found)))


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        why = "it is not installed: pip install llguidance (hocket[server] has it)"
        raise BackendUnavailable("package", "llguidance", why) from None
    return llguidance
