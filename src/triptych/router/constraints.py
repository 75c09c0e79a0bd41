"""What a request says of its output, as workers read it: grammars of structures and calls, and `bad_words` in tokens.

Called by `router.py` for every request, before a worker hears of it.
"""

from __future__ import annotations

import asyncio

import msgspec
from tokenizers import Tokenizer

from triptych.errors import BadRequestError
from triptych.prompt.grammar import compile_structure
from triptych.prompt.layout import PromptBuilder
from triptych.prompt.tools import ToolFormat, check_parameters, tool_grammar
from triptych.types import Request, ToolChoice


async def constrain(request: Request, builder: PromptBuilder) -> Request:
    """Raises BadRequestError, which names the field, for what cannot be enforced."""
    sampling = request.sampling
    calls = call_format(request, builder)
    if request.structure is not None or (calls is not None and request.tool_choice is ToolChoice.REQUIRED):
        grammar = await asyncio.to_thread(
            _grammar, request, calls
        )  # milliseconds that others' tokens need not wait for
        sampling = msgspec.structs.replace(sampling, grammar=grammar)
    if request.bad_words:
        sampling = msgspec.structs.replace(sampling, bad_words=bad_words(request.bad_words, builder.tokenizer))
    return msgspec.structs.replace(request, sampling=sampling)


def call_format(request: Request, builder: PromptBuilder) -> ToolFormat | None:
    """How the output may have calls; None where none are looked for. Raises BadRequestError that names `tools`."""
    if not request.tools or request.tool_choice is ToolChoice.NONE or request.structure is not None:
        return None
    check_parameters(request.tools, request.function_param)
    found = ToolFormat.detect(request.chat_template or builder.template.source)
    if found is None:
        raise BadRequestError("this model's chat template has no form of calls that is known here", param="tools")
    return found


def _grammar(request: Request, calls: ToolFormat | None) -> str:
    if request.structure is not None:
        return compile_structure(request.structure)
    assert calls is not None, "only for calls that must come"
    choice = request.forced_tool or "required"
    return tool_grammar(calls, request.tools, choice, request.parallel_tool_calls, request.function_param)


def bad_words(words: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as it is spelt at the beginning of a text, and behind a space, where it is other tokens."""
    spelt: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    for word in words:
        for text in (word, " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
            if token_ids:
                spelt[token_ids] = None
    return [list(token_ids) for token_ids in spelt]
