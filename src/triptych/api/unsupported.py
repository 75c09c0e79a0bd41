"""Request fields that would change the result and are not implemented, with the values that change nothing.

`null` is always neutral. A field that is neither here nor among those of the request is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

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
}
CHAT: Neutral = {
    **GENERATION,
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
    "modalities": (["text"],),
    "use_beam_search": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}


def refuse_unsupported(body: Mapping[str, object], neutral: Neutral) -> None:
    """Raises UnsupportedFieldError for the first field whose value is neither null nor neutral."""
    for field, values in neutral.items():
        value = body.get(field)
        if value is not None and value not in values:
            raise UnsupportedFieldError(f"`{field}` is not implemented with this value.", param=field)
