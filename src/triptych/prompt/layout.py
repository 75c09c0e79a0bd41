"""Messages and metadata to a `Prompt`: every token, and every media item's span, before any media is decoded.

Runs in the router; called once a request. The family's own rules come in as a `MediaLayout`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from triptych.errors import BadRequestError, ConfigError
from triptych.prompt.detokenize import IncrementalDetokenizer
from triptych.prompt.template import ChatTemplate
from triptych.types import ImageSize, ItemMetadata, MediaItem, Placeholder, Prompt, PromptItem

FIRST_SENTINEL = 0x100000  # a private-use plane: stands for special tokens' texts that a user typed


class MediaLayout(Protocol):
    """A model family's rules for media in prompts; `models/` implements it, without torch."""

    @property
    def placeholder_text(self) -> str:
        """What the chat template leaves for one item: the text of one token."""
        ...

    def image_metadata(self, size: ImageSize) -> ItemMetadata:
        """Raises BadRequestError for a size that the model cannot read."""
        ...

    def expansion(self, metadata: ItemMetadata) -> list[int]:
        """The token ids that stand for the item, `num_tokens` of them."""
        ...


class PromptBuilder:
    """The tokenizer and the chat template of one checkpoint. Raises ConfigError where one is missing."""

    def __init__(self, model_dir: Path, layout: MediaLayout) -> None:
        self.layout = layout
        self._template = ChatTemplate.load(model_dir)
        self._tokenizer = load_tokenizer(model_dir)
        # A second copy, because the switch is state: it takes the texts of special tokens for plain text.
        self._plain = load_tokenizer(model_dir)
        self._plain.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items()}
        if layout.placeholder_text not in self._special_ids:
            raise ConfigError(f"{model_dir}: the tokenizer has no token {layout.placeholder_text}")
        self._placeholder_id = self._special_ids[layout.placeholder_text]
        by_length = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, by_length)) + ")")
        self._sentinels = {text: chr(FIRST_SENTINEL + i) for i, text in enumerate(by_length)}

    def build(
        self,
        messages: Sequence[Mapping[str, object]],
        items: Sequence[MediaItem],
        *,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> Prompt:
        """Raises BadRequestError when the template refuses, or shows another number of items than there are."""
        quoted = [self._quote_message(message) for message in messages]
        text = self._template.render(quoted, add_generation_prompt, template_kwargs or {})
        return self._expand(self._encode(text), items)

    def detokenizer(
        self, stop: Sequence[str] = (), *, skip_special_tokens: bool = True, include_stop: bool = False
    ) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self._tokenizer, stop, skip_special_tokens, include_stop)

    # -- what a user typed is text, whatever it looks like -------------------------------------------------------------

    def _quote_message(self, message: Mapping[str, object]) -> dict[str, object]:
        return {key: self._quote(value) for key, value in message.items()}

    def _quote(self, value: object) -> object:
        if isinstance(value, str):
            return self._special.sub(lambda match: self._sentinels[match.group()], value)
        if isinstance(value, Mapping):
            return {key: self._quote(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self._quote(entry) for entry in value]
        return value

    def _unquote(self, text: str) -> str:
        for special, sentinel in self._sentinels.items():
            text = text.replace(sentinel, special)
        return text

    def _encode(self, text: str) -> list[int]:
        """Token ids of a rendered template. Only the template's own special tokens become special tokens.

        The tokenizer itself splits at special tokens first, so encoding the runs between them one by one gives the
        same ids.
        """
        ids: list[int] = []
        for run in self._special.split(text):
            if run in self._special_ids:
                ids.append(self._special_ids[run])
            elif run:
                ids += self._plain.encode(self._unquote(run), add_special_tokens=False).ids
        return ids

    # -- items at their places -----------------------------------------------------------------------------------------

    def _expand(self, ids: list[int], items: Sequence[MediaItem]) -> Prompt:
        """Replace the n-th placeholder by the n-th item's expansion."""
        places = ids.count(self._placeholder_id)
        if places != len(items):
            raise BadRequestError(f"the chat template shows {places} of {len(items)} media items", param="messages")
        token_ids: list[int] = []
        placed: list[PromptItem] = []
        remaining = iter(items)
        for token_id in ids:
            if token_id != self._placeholder_id:
                token_ids.append(token_id)
                continue
            item = next(remaining)
            expansion = self.layout.expansion(item.metadata)
            span = Placeholder(len(token_ids), len(expansion))
            placed.append(PromptItem(item.modality, item.mm_hash, span, item.metadata))
            token_ids += expansion
        return Prompt(token_ids, placed)


def load_tokenizer(model_dir: Path) -> Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{model_dir} has no tokenizer.json")
    tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
