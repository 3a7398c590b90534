"""A rank's side of JSON schemas: loads the tokenizer when the first request needs one. Knows no logits."""

from __future__ import annotations

from hocket.config.engine import EngineConfig
from hocket.request import Request
from hocket.tokenizer.grammar import Grammars
from hocket.tokenizer.tokenizer import Tokenizer


class Schemas:
    """Gives requests that have a JSON schema what follows it along their output."""

    def __init__(self, config: EngineConfig) -> None:
        self._path = config.tokenizer_path
        self._vocab_size = config.model.vocab_size
        self._grammars: Grammars | None = None

    def attach(self, request: Request) -> None:
        """Set the request's `follower`, if it has a schema (which the front has checked)."""
        schema = request.params.json_schema
        if not isinstance(schema, str):
            return
        if self._grammars is None:
            self._grammars = Grammars(Tokenizer.from_pretrained(self._path), self._vocab_size)
        request.follower = self._grammars.follow(schema, request.eos_token_ids)
