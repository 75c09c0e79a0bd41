"""Request fields that would change the result and are not implemented, with the values that change nothing.

Read by `api/openai.py`. `null` is always neutral. A field that is neither here nor in `ChatRequest` is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from triptych.errors import UnsupportedFieldError

NEUTRAL: dict[str, tuple[object, ...]] = {
    # OpenAI
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none",),
    "functions": ([],),
    "function_call": ("none",),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    # vLLM, sampling
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "logprob_token_ids": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "structural_tag": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "watermarking": (False,),
    # vLLM, template
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    # vLLM, multimodal
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "mm_payload": (),
    "return_mm_kwargs": (False,),
    "prompt_embeds": (),
    # vLLM, serving: each asks for something in the answer that we do not return
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "vllm_xargs": ({},),
    "return_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_prompt_text": (False,),
}


def refuse_unsupported(body: Mapping[str, object]) -> None:
    """Raises UnsupportedFieldError for the first field whose value is neither null nor neutral."""
    for field, neutral in NEUTRAL.items():
        value = body.get(field)
        if value is not None and value not in neutral:
            raise UnsupportedFieldError(f"`{field}` is not implemented with this value.", param=field)
