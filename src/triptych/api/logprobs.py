"""Log-probabilities in the three forms that clients know: OpenAI's chat, OpenAI's older completions, vLLM's prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from triptych.types import ScoredToken, TokenLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity: of a token that cannot be drawn


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Lists of one length. The first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # where the token's text begins, in characters of the choice's text


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # one a token of the prompt, by token id


def token_text(token: ScoredToken, as_id: bool) -> str:
    return f"token_id:{token.token_id}" if as_id else token.content.decode(errors="replace")


def _logprob(token: ScoredToken) -> float:
    return max(token.logprob, MIN_LOGPROB)


def chat_logprobs(scored: Iterable[TokenLogprobs], as_ids: bool) -> ChatLogprobs:
    content = [
        ChatLogprob(
            token_text(entry.chosen, as_ids),
            _logprob(entry.chosen),
            list(entry.chosen.content),
            [TopLogprob(token_text(token, as_ids), _logprob(token), list(token.content)) for token in entry.top],
        )
        for entry in scored
    ]
    return ChatLogprobs(content)


def completion_logprobs(
    scored: Sequence[TokenLogprobs | None], as_ids: bool, offset: int = 0, first: ScoredToken | None = None
) -> CompletionLogprobs:
    """`first` is the token of an entry that is None: the one with which a prompt begins."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for entry in scored:
        token = entry.chosen if entry is not None else first
        assert token is not None, "whoever echoes a prompt has its first token"
        tokens.append(token_text(token, as_ids))
        offsets.append(offset)
        offset += len(token_text(token, False))
        logprobs.append(None if entry is None else _logprob(entry.chosen))
        tops.append(None if entry is None else _by_text(entry, as_ids))
    return CompletionLogprobs(tokens, logprobs, tops, offsets)


def _by_text(entry: TokenLogprobs, as_ids: bool) -> dict[str, float]:
    """The likeliest first. Where two tokens have one text, the likelier stays."""
    found: dict[str, float] = {}
    for token in (*entry.top, entry.chosen):
        found.setdefault(token_text(token, as_ids), _logprob(token))
    return found


def prompt_logprobs(scored: Iterable[TokenLogprobs | None]) -> PromptLogprobs:
    return [None if entry is None else _by_id(entry) for entry in scored]


def _by_id(entry: TokenLogprobs) -> dict[str, PromptLogprob]:
    ranked = [(entry.rank, entry.chosen), *enumerate(entry.top, 1)]
    return {
        str(token.token_id): PromptLogprob(_logprob(token), rank, token_text(token, False)) for rank, token in ranked
    }
