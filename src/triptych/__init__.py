"""Triptych: multimodal language models served as three stages that scale separately: encode, prefill, decode."""

__version__ = "0.1.0"
