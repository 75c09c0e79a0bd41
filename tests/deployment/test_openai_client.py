"""The real `openai` client against real processes: pictures, streaming, errors, usage and timing."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.deployment.conftest import image_part
from triptych.config import Config
from triptych.launch import Deployment
from triptych.placement import Placement


@pytest_asyncio.fixture(params=["EPD", "1E/1P/1D"])
async def client(config: Config, request: pytest.FixtureRequest) -> AsyncIterator[AsyncOpenAI]:
    async with (
        Deployment(config, Placement.parse(request.param)) as deployment,
        AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def _messages(*parts: dict[str, object]) -> list:  # type: ignore[type-arg]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it"}]}]


async def test_pictures_streams_and_errors(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    messages = _messages(image_part(1), image_part(2, 130, 40), image_part(1))

    whole = await client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=12, extra_body={"ignore_eos": True, "timing": True}
    )
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    details = whole.usage.model_dump()["prompt_tokens_details"]
    assert details["multimodal_tokens"]["image"] > 0
    timing = whole.model_dump()["timing"]
    assert sum(span["duration_s"] for span in timing["critical_path"]) == pytest.approx(timing["ttft_s"], rel=0.05)

    text, usage = "", None
    stream = await client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_tokens=12, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    async for chunk in stream:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.completion_tokens == 12
    assert usage.model_dump()["prompt_tokens_details"]["cached_tokens"] > 0

    broken: dict[str, object] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="image"):
        await client.chat.completions.create(model="tiny", messages=_messages(broken), stream=True)
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=_messages())
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        await client.chat.completions.create(model="tiny", messages=_messages(), max_tokens=10**6, stream=True)
