"""`continue_final_message`: the prompt ends inside the last message, so that the model goes on with it.

As in transformers: a mark is put behind the message's text before rendering, and the prompt ends where it comes out.
"""

from __future__ import annotations

from typing import Any

from triptych.errors import BadRequestError

_FIELD = "continue_final_message"


def mark_end(messages: list[dict[str, Any]], mark: str) -> tuple[list[dict[str, Any]], str]:
    """The messages with `mark` and a space behind the last text of the last one, and that text.

    The space tells afterwards whether the template trims. Raises BadRequestError where there is no text.
    """
    *others, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*others, {**last, "content": f"{content}{mark} "}], content
    parts = list(content) if isinstance(content, list) else []
    for k in reversed(range(len(parts))):
        if "text" in parts[k]:
            text = parts[k]["text"]
            parts[k] = {**parts[k], "text": f"{text}{mark} "}
            return [*others, {**last, "content": parts}], text
    raise BadRequestError("the last message has no text to go on with", param=_FIELD)


def cut_at(rendered: str, mark: str, text: str) -> str:
    """The prompt up to the mark. Raises BadRequestError where the template changed or dropped the message."""
    at = rendered.rfind(mark)
    if at < 0 or text.strip() not in rendered:
        raise BadRequestError("the chat template does not keep the last message's text as it is", param=_FIELD)
    kept = rendered[:at].replace(f"{mark} ", "").replace(mark, "")  # a template may print a message twice
    return kept if rendered.startswith(f"{mark} ", at) else kept.rstrip()
