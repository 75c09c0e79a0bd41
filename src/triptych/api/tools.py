"""The tools that a chat request offers, and which of them the model may, must not or must call."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from triptych.errors import BadRequestError
from triptych.types import ToolChoice

TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_TOOLS = 128


class Function(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: Function


class FunctionName(msgspec.Struct, frozen=True):
    name: str


class NamedTool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionName


Choice = Literal["none", "auto", "required"] | NamedTool


class Offer(msgspec.Struct, frozen=True):
    """As `types.Request` has it."""

    tools: list[dict[str, Any]] = []
    choice: ToolChoice = ToolChoice.AUTO
    forced: str = ""


def read_tools(tools: list[Tool] | None, choice: Choice | None, function_param: str = "function.") -> Offer:
    """Raises BadRequestError for names that are wrong or twice, and for a choice that the tools do not allow.

    `function_param` is what comes before the fields of a function in what the client sent.
    """
    if not tools:
        if choice not in (None, "none"):
            raise BadRequestError("`tool_choice` needs `tools`.", param="tool_choice")
        return Offer(choice=ToolChoice.NONE)
    names = [tool.function.name for tool in tools]
    if len(tools) > MAX_TOOLS:
        raise BadRequestError(f"`tools` has {len(tools)} tools, the limit is {MAX_TOOLS}.", param="tools")
    for k, name in enumerate(names):
        if not TOOL_NAME.fullmatch(name) or name in names[:k]:
            param = f"tools.{k}.{function_param}name"
            raise BadRequestError(
                f"`{param}` must be 1 to 64 letters, digits, _ or -, and no other tool's.", param=param
            )
    plain = [_plain(tool) for tool in tools]
    if not isinstance(choice, NamedTool):
        return Offer(plain, ToolChoice(choice or "auto"))
    if choice.function.name not in names:
        why = f"`tool_choice` names {choice.function.name[:128]!r}, which `tools` has not."
        raise BadRequestError(why, param="tool_choice")
    return Offer(plain, ToolChoice.REQUIRED, choice.function.name)


def _plain(tool: Tool) -> dict[str, Any]:
    """As chat templates print it: without what the client left out."""
    function = {name: value for name, value in msgspec.structs.asdict(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}
