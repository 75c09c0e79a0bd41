"""Chat messages and media items to the whole token layout of a prompt. Called by the router for every request.

Nothing here needs a pixel: how many tokens an item fills follows from its metadata.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from triptych.errors import BadRequestError, ConfigError
from triptych.prompt.continuation import cut_at, mark_end
from triptych.prompt.guard import ClientText, SpecialTokens
from triptych.prompt.template import ChatTemplate, read_settings
from triptych.types import ImageSize, ItemMetadata, MediaItem, PixelLimits, Placeholder, Prompt, PromptItem


class MediaLayout(Protocol):
    """How a model family writes media into a prompt. Implemented in `models/`, handed in."""

    @property
    def placeholder_text(self) -> str:
        """What the chat template leaves for one item: the text of one token."""
        ...

    def pixel_limits(self, options: Mapping[str, object]) -> PixelLimits:
        """Under a request's `mm_processor_kwargs`. Raises BadRequestError naming an option that cannot be served."""
        ...

    def image_metadata(self, size: ImageSize, limits: PixelLimits | None = None) -> ItemMetadata:
        """Raises BadRequestError for an image that the model cannot read. `limits`: None for the checkpoint's own."""
        ...

    def expansion(self, metadata: ItemMetadata) -> list[int]:
        """The token ids that take the place of the one placeholder token, `num_tokens` of them."""
        ...


def num_characters(value: object) -> int:
    """Characters of all strings in messages or template variables, however deep they lie."""
    total, pending = 0, [value]
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            total += len(value)
        elif isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            pending += value
    return total


Variables = dict[str, dict[str, Any]]  # of a template, by the request's field that brings them


def _hidden(client: ClientText, value: Any, param: str) -> Any:
    try:
        return client.hide(value)
    except RecursionError:
        raise BadRequestError(f"`{param}` is nested too deep", param=param) from None


def _render(
    template: ChatTemplate, messages: list[dict[str, Any]], add_generation_prompt: bool, variables: Variables
) -> str:
    """Raises BadRequestError, which names the field without which the template does not fail; else `messages`."""

    def rendered(fields: Variables) -> str:
        given = {name: value for brought in fields.values() for name, value in brought.items()}
        for reserved in ("messages", "add_generation_prompt"):
            given.pop(reserved, None)
        return template.render(messages, add_generation_prompt, **given)

    try:
        return rendered(variables)
    except BadRequestError as error:
        for param in [param for param, brought in variables.items() if brought]:
            with contextlib.suppress(BadRequestError):
                rendered({**variables, param: {}})
                error.param = param
                break
        raise


class PromptBuilder:
    """One for the router's life. Raises ConfigError for a checkpoint whose files do not fit together."""

    def __init__(self, model_dir: Path, layout: MediaLayout) -> None:
        self.layout = layout
        self.tokenizer = _load_tokenizer(model_dir / "tokenizer.json")
        self.template = ChatTemplate.load(model_dir)
        placeholder_id = self.tokenizer.token_to_id(layout.placeholder_text)
        if placeholder_id is None:
            raise ConfigError(f"{model_dir / 'tokenizer.json'} has no token {layout.placeholder_text!r}")
        self._placeholder_id = placeholder_id
        self._specials = SpecialTokens(self.tokenizer, layout.placeholder_text)
        self.vocab_size = self._vocab_size(model_dir)
        self.eos_token_ids = self._eos_token_ids(model_dir)

    def build(
        self,
        messages: list[dict[str, Any]],
        items: list[MediaItem],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool | None = None,
        chat_template: str = "",
        template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
    ) -> Prompt:
        """The prompt, its items bound to the template's placeholders in order.

        Raises BadRequestError where the template refuses the messages or leaves another number of placeholders.
        """
        client = ClientText(self._specials)
        template = self.template.with_source(chat_template) if chat_template else self.template
        variables: Variables = {"chat_template_kwargs": _hidden(client, template_kwargs or {}, "chat_template_kwargs")}
        for name, given in (("tools", tools), ("documents", documents)):
            variables[name] = {name: _hidden(client, given, name)} if given else {}
        hidden = _hidden(client, messages, "messages")
        if continue_final_message:
            marked, text = mark_end(hidden, client.mark)
            rendered = cut_at(_render(template, marked, add_generation_prompt, variables), client.mark, text)
        else:
            rendered = _render(template, hidden, add_generation_prompt, variables)
        if add_special_tokens is None:
            add_special_tokens = self._wants_special_tokens(rendered)
        tokens = self._specials.encode(rendered, client, add_special_tokens)
        self._require_places(tokens, items, "the chat template left", "messages")
        return self._place(tokens, items)

    def build_plain(
        self, prompt: str | list[int], add_special_tokens: bool = True, items: Sequence[MediaItem] = ()
    ) -> Prompt:
        """A prompt that no template touches, its items bound to the placeholders in it in order.

        Without items the placeholder's text is text; its token is refused, because no image belongs to it. Raises
        BadRequestError for an empty prompt, and for another number of placeholders than of items.
        """
        if isinstance(prompt, str):
            tokens = self._specials.encode_prompt(prompt, add_special_tokens, with_placeholder=bool(items))
        elif not items and self._placeholder_id in prompt:
            raise BadRequestError(
                f"the prompt has the token {self.layout.placeholder_text} and no image", param="prompt"
            )
        else:
            tokens = [(token_id, token_id == self._placeholder_id) for token_id in prompt]
        self._require_places(tokens, items, "the prompt has", "prompt")
        built = self._place(tokens, items)
        if not built.token_ids:
            raise BadRequestError("the prompt has no tokens", param="prompt")
        return built

    def _wants_special_tokens(self, rendered: str) -> bool:
        """transformers' processors let the tokenizer add its own (a BOS) unless the template wrote it."""
        bos = self.template.named_tokens.get("bos_token")
        return not (bos and rendered.startswith(bos))

    def _require_places(
        self, tokens: list[tuple[int, bool]], items: Sequence[MediaItem], whose: str, param: str
    ) -> None:
        found = sum(token_id == self._placeholder_id and special for token_id, special in tokens)
        if found != len(items):
            hint = "; the model's template may not take images in this role" if param == "messages" else ""
            raise BadRequestError(f"{whose} places for {found} images, the request has {len(items)}{hint}", param=param)

    def _place(self, tokens: list[tuple[int, bool]], items: Sequence[MediaItem]) -> Prompt:
        token_ids: list[int] = []
        placed: list[PromptItem] = []
        for token_id, special in tokens:
            if token_id != self._placeholder_id:
                token_ids.append(token_id)
            elif special:
                item = items[len(placed)]
                expansion = self.layout.expansion(item.metadata)
                placeholder = Placeholder(len(token_ids), len(expansion))
                placed.append(PromptItem(item.modality, item.mm_hash, placeholder, item.metadata))
                token_ids += expansion
            else:  # a vocabulary that has the placeholder as an ordinary piece as well
                raise BadRequestError(f"this model cannot read {self.layout.placeholder_text!r} as text")
        return Prompt(token_ids, placed)

    def _vocab_size(self, model_dir: Path) -> int:
        """Rows of the model's head, which are often more than the tokenizer's tokens."""
        config = read_settings(model_dir / "config.json")
        size = config.get("text_config", {}).get("vocab_size") or config.get("vocab_size")
        return size if isinstance(size, int) else self.tokenizer.get_vocab_size()

    def _eos_token_ids(self, model_dir: Path) -> tuple[int, ...]:
        """The generation config's ids, which may be several; else the model's, else the tokenizer's."""
        config = read_settings(model_dir / "config.json")
        for settings in (read_settings(model_dir / "generation_config.json"), config.get("text_config", {}), config):
            ids = settings.get("eos_token_id")
            if ids is not None:
                return (ids,) if isinstance(ids, int) else tuple(ids)
        eos_id = self.tokenizer.token_to_id(self.template.named_tokens.get("eos_token", ""))
        return () if eos_id is None else (eos_id,)


def _load_tokenizer(file: Path) -> Tokenizer:
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; checkpoints need the tokenizer in this form")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises nothing more special
        raise ConfigError(f"{file}: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
