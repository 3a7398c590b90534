"""The tokenizer as scripts for transformers and vLLM use it, chat template included. Knows nothing of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hocket.errors import ConfigError
from hocket.tokenizer.chat import ChatTemplate
from hocket.tokenizer.tokenizer import Tokenizer


class Encoding(dict[str, Any]):
    """What calling a tokenizer gives: `input_ids` and `attention_mask`, as entries or attributes."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class ChatTokenizer(Tokenizer):
    """A Tokenizer with its directory's chat template and the common names of transformers' tokenizers."""

    name_or_path: str = ""
    chat_template: str | None = None
    """What replaces the directory's template: a file, Jinja source, or the name of one of several."""
    _templates: dict[str | None, ChatTemplate]

    @classmethod
    def from_pretrained(cls, path: str | Path, chat_template: str | None = None) -> ChatTokenizer:
        """As Tokenizer.from_pretrained. A wrong `chat_template` raises ConfigError when it is first used."""
        tokenizer = super().from_pretrained(path)
        assert isinstance(tokenizer, ChatTokenizer)
        tokenizer.name_or_path, tokenizer.chat_template, tokenizer._templates = str(path), chat_template, {}
        return tokenizer

    def template(self, override: str | None = None) -> ChatTemplate:
        """The chat template, kept: compiling one takes longer than rendering it."""
        override = override or self.chat_template
        if override not in self._templates:
            self._templates[override] = ChatTemplate.from_pretrained(self.name_or_path, self, override)
        return self._templates[override]

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Text (`tokenize=False`) or ids of a conversation, {"role": …, "content": …} each; a list for a list of such.

        return_dict: an Encoding instead of the ids. variables: for the template, such as enable_thinking.

        Raises ConfigError when there is no template or it refuses the messages.
        """
        _refuse_tensors(variables.pop("return_tensors", None))
        is_one = not conversation or isinstance(conversation[0], Mapping)
        texts = [
            self.template(chat_template).render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            for messages in ([conversation] if is_one else conversation)
        ]
        if not tokenize:
            return texts[0] if is_one else texts
        encoded = self(texts[0] if is_one else texts, add_special_tokens=False)
        return encoded if return_dict else encoded.input_ids

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: None = None,
    ) -> Encoding:
        """Ids of a text, or of each of several. Truncation cuts at the end; nothing is ever padded."""
        _refuse_tensors(return_tensors)
        texts = [text] if isinstance(text, str) else list(text)
        most = max_length if truncation else None
        ids = [self.encode(one, add_special_tokens=add_special_tokens)[:most] for one in texts]
        masks = [[1] * len(one) for one in ids]
        if isinstance(text, str):
            return Encoding(input_ids=ids[0], attention_mask=masks[0])
        return Encoding(input_ids=ids, attention_mask=masks)

    def decode(self, ids: int | Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of one id or several. Special tokens are shown unless left out, as in transformers."""
        return super().decode([ids] if isinstance(ids, int) else ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or those of several; None for what is no token."""
        return self.id_of(tokens) if isinstance(tokens, str) else [self.id_of(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        vocab: dict[str, int] = self.backend.get_vocab(with_added_tokens=True)
        return vocab

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    def __bool__(self) -> bool:
        return True

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        return self.id_of(self.pad_token)


def _refuse_tensors(wanted: object) -> None:
    if wanted is not None:
        raise ConfigError("return_tensors", wanted, "None (lists of ids are returned)")
