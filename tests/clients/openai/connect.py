"""The client under test, without retries: what fails must be seen to fail."""

from __future__ import annotations

from openai import AsyncOpenAI, OpenAI

from tests.clients.script import Server

TIMEOUT_S = 120.0


def connect(server: Server, api_key: str | None = None) -> OpenAI:
    key = server.api_key if api_key is None else api_key
    return OpenAI(base_url=server.base_url, api_key=key, max_retries=0, timeout=TIMEOUT_S)


def connect_async(server: Server) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=server.base_url, api_key=server.api_key, max_retries=0, timeout=TIMEOUT_S)
