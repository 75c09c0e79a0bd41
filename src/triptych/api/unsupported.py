"""Request fields that would change the result and are not implemented, with the values that change nothing.

`null` is always neutral. What chat implements or refuses is refused wherever a route lacks it (`elsewhere`). A field
that is neither here nor among those of any request is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from triptych.errors import UnsupportedFieldError

Neutral = Mapping[str, tuple[object, ...]]

GENERATION: Neutral = {
    # OpenAI
    "modalities": (["text"],),
    "audio": (),
    # vLLM, sampling
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "logprob_token_ids": ([],),
    "use_beam_search": (False,),
    "structural_tag": (),
    "guided_whitespace_pattern": (),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "watermarking": (False,),
    # vLLM, serving: each asks for something in the answer that we do not return
    "prompt_embeds": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
    # of the Responses API
    "input": (),
    "instructions": ("",),
    "max_output_tokens": (),
}
CHAT: Neutral = {
    **GENERATION,
    "prompt": (),
    "best_of": (1,),
    "functions": ([],),
    "function_call": ("none",),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "mm_payload": (),
    "return_mm_kwargs": (False,),
}
COMPLETIONS: Neutral = {
    **GENERATION,
    "suffix": ("",),
}
RESPONSES: Neutral = {
    # kept between calls: this server keeps nothing. `store` is taken and answered with false.
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "context_management": ([],),
    # of the model
    "n": (1,),
    "max_tool_calls": (),
    "reasoning": ({}, {"effort": "none"}),
    "truncation": ("disabled",),
    "moderation": (),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}, {"include_obfuscation": False}),
}
# Of fields that some route implements: what changes nothing on a route that does not.
ABSENT: Neutral = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "media_io_kwargs": ({},),
    "min_tokens": (0,),
    "mm_processor_kwargs": ({},),
    "parallel_tool_calls": (True, False),  # without tools
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "timing": (False,),
    "tool_choice": ("none",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncation_side": ("left",),
}


def elsewhere(own: type[msgspec.Struct], neutral: Neutral, other: type[msgspec.Struct], others: Neutral) -> Neutral:
    """All that the route of `own` refuses: what is `neutral`, and what that of `other` knows and this one lacks."""
    known = {**{field: ABSENT.get(field, ()) for field in other.__struct_fields__}, **others, **neutral}
    return {field: values for field, values in known.items() if field not in own.__struct_fields__}


def refuse_unsupported(body: Mapping[str, object], neutral: Neutral) -> None:
    """Raises UnsupportedFieldError for the first field whose value is neither null nor neutral."""
    for field, values in neutral.items():
        value = body.get(field)
        if value is not None and value not in values:
            raise UnsupportedFieldError(f"`{field}` is not implemented here{_but(values)}.", param=field)


def _but(values: tuple[object, ...]) -> str:
    """What may be said all the same."""
    texts = [msgspec.json.encode(value).decode() for value in values]
    return f"; it may only be {' or '.join(texts)}" if texts else ""
