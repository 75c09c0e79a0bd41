"""Whether what a worker says of a request can be true: asked before the router relies on it. Pure.

A worker never sends what is refused here; a bug, another build or an intruder may, and must not take the router down.
"""

from __future__ import annotations

from collections.abc import Collection

from triptych import messages
from triptych.messages import RequestMessage, TokenOutput

MAX_TOKEN_ID = 2**31 - 1  # some models have more rows than their tokenizer has tokens
LONGEST_S = 1e9  # of a duration; NaN and infinity are none


def why_impossible(message: RequestMessage | TokenOutput, mm_hashes: Collection[str], num_tokens: int) -> str:
    """Empty unless it names items that the request lacks, or numbers that cannot be. It has `num_tokens` so far."""
    match message:
        case messages.Accepted():
            if not 0 <= message.num_cached_tokens < num_tokens:
                return f"{message.num_cached_tokens} of {num_tokens} tokens are cached"
            return _why_no_items(message.needed, mm_hashes)
        case messages.EmbeddingsNeeded():
            return _why_no_items(message.mm_hashes, mm_hashes)
        case messages.ItemEncoded():
            return _why_no_items([message.mm_hash], mm_hashes) or _why_no_times(message.queue_s, message.encode_s)
        case messages.ItemHeld():
            return _why_no_items([message.mm_hash], mm_hashes) or _why_no_times(message.transfer_s)
        case messages.ItemFailed() | messages.ItemLost():
            return _why_no_items([message.mm_hash], mm_hashes)
        case TokenOutput():
            return _why_no_output(message)
        case _:
            return ""


def _why_no_items(named: Collection[str], mm_hashes: Collection[str]) -> str:
    return next((f"the request has no item {mm_hash[:64]}" for mm_hash in named if mm_hash not in mm_hashes), "")


def _why_no_times(*durations_s: float) -> str:
    return next((f"it took {duration_s} s" for duration_s in durations_s if not 0.0 <= duration_s < LONGEST_S), "")


def _why_no_output(output: TokenOutput) -> str:
    if output.index < 0 or not output.token_ids:
        return f"{len(output.token_ids)} tokens at {output.index}"
    scored = [output.token_ids, *(entry.token_ids for entry in (*output.logprobs, *output.prompt_logprobs))]
    if any(not 0 <= token_id <= MAX_TOKEN_ID for token_ids in scored for token_id in token_ids):
        return "a token has no possible number"
    if len(output.logprobs) not in (0, len(output.token_ids)):
        return f"{len(output.logprobs)} log-probabilities for {len(output.token_ids)} tokens"
    if any(len(e.token_ids) != len(e.logprobs) for e in (*output.logprobs, *output.prompt_logprobs)):
        return "tokens and their log-probabilities differ in number"
    prefill, decode = output.prefill, output.decode
    return (_why_no_times(prefill.queue_s, prefill.embed_wait_s, prefill.prefill_s) if prefill is not None else "") or (
        _why_no_times(decode.kv_transfer_s, decode.queue_s) if decode is not None else ""
    )
