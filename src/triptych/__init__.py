"""Triptych: multimodal language models served as three stages that scale separately: encode, prefill, decode.

`from triptych import LLM` is for use without a server; what it needs is imported with it, and not before.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from triptych.offline.llm import LLM
    from triptych.offline.outputs import BatchError, CompletionOutput, RequestOutput
    from triptych.offline.params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BatchError", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]

_PLACES = {
    "LLM": "triptych.offline.llm",
    "BatchError": "triptych.offline.outputs",
    "CompletionOutput": "triptych.offline.outputs",
    "RequestOutput": "triptych.offline.outputs",
    "SamplingParams": "triptych.offline.params",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
