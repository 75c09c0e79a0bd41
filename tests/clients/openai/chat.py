"""Chat with pictures, whole and streamed, several choices, log probabilities, and the list of models."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from openai import AsyncOpenAI

from tests.clients.openai.connect import connect, connect_async
from tests.clients.script import MAX_TOKENS, Server, chat_messages, questions
from triptych.demo.pages import Question

TEXT: list[Any] = [{"role": "user", "content": "Count from 2 to 7."}]
TEXT_ANSWER = "2 3 4 5 6 7"


def models(server: Server) -> None:
    client = connect(server)
    listed = list(client.models.list())
    assert [model.id for model in listed] == [server.model], listed
    one = client.models.retrieve(server.model)
    assert (one.id, one.object) == (server.model, "model"), one
    assert one.created > 0, one
    assert one.owned_by, one


def answers(server: Server) -> None:
    client = connect(server)
    for question in questions(8):
        answer = client.chat.completions.create(
            model=server.model, messages=chat_messages(question), temperature=0, max_completion_tokens=MAX_TOKENS
        )
        assert answer.object == "chat.completion", answer
        assert answer.model == server.model, answer
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant"), choice
        assert choice.message.content == question.answer, (question.text, question.answer, choice.message.content)
        usage = answer.usage
        assert usage is not None
        assert 0 < usage.completion_tokens <= MAX_TOKENS, usage
        assert usage.prompt_tokens > len(question.images), usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage


def stream(server: Server) -> None:
    client = connect(server)
    (question,) = questions(1)
    chunks = list(
        client.chat.completions.create(
            model=server.model,
            messages=chat_messages(question),
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert len({chunk.id for chunk in chunks}) == 1, [chunk.id for chunk in chunks]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant", chunks[0]
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == question.answer, (question, chunks)
    ends = [choice.finish_reason for choice in choices if choice.finish_reason]
    assert ends == ["stop"], ends
    usages = [chunk for chunk in chunks if chunk.usage is not None]
    assert usages == chunks[-1:], "the usage must come once, in the last chunk"
    assert chunks[-1].choices == [], chunks[-1]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0, chunks[-1]


def stream_with_usage_in_every_chunk(server: Server) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        connect(server).chat.completions.create(
            model=server.model, messages=TEXT, temperature=0, max_tokens=MAX_TOKENS, stream=True, stream_options=options
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks), f"{len(counts)} of {len(chunks)} chunks had usage"
    assert counts == sorted(counts), counts
    assert counts[-1] >= len(TEXT_ANSWER.split()), counts


def stream_events(server: Server) -> None:
    """The SDK's own reading of a stream, which puts the whole answer together again."""
    client = connect(server)
    with client.chat.completions.stream(
        model=server.model, messages=TEXT, temperature=0, max_completion_tokens=MAX_TOKENS
    ) as events:
        kinds = [event.type for event in events]
        whole = events.get_final_completion()
    assert whole.choices[0].message.content == TEXT_ANSWER, whole
    for kind in ("chunk", "content.delta", "content.done"):
        assert kind in kinds, kinds


def stream_that_is_left(server: Server) -> None:
    """A client that goes in the middle leaves a server that answers the next one."""
    client = connect(server)
    with client.chat.completions.create(
        model=server.model, messages=TEXT, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ) as chunks:
        next(iter(chunks))
    whole = client.chat.completions.create(model=server.model, messages=TEXT, temperature=0, max_tokens=MAX_TOKENS)
    assert whole.choices[0].message.content == TEXT_ANSWER, whole


def many_at_once(server: Server) -> None:
    async def ask(client: AsyncOpenAI, question: Question) -> str | None:
        answer = await client.chat.completions.create(
            model=server.model, messages=chat_messages(question), temperature=0, max_tokens=MAX_TOKENS
        )
        return answer.choices[0].message.content

    async def ask_all() -> list[str | None]:
        async with connect_async(server) as client:
            return await asyncio.gather(*(ask(client, question) for question in asked))

    asked = questions(8)
    got = asyncio.run(ask_all())
    assert got == [question.answer for question in asked], got


def conversation(server: Server) -> None:
    """Roles other than the user's, and a picture that an earlier turn has shown."""
    first = questions(1)[0]
    messages: list[Any] = [
        {"role": "developer", "content": "Answer in one word."},
        *chat_messages(first),
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": [{"type": "text", "text": "What is 2 plus 3?"}]},
    ]
    answer = connect(server).chat.completions.create(model=server.model, messages=messages, max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 0, answer
    assert isinstance(answer.choices[0].message.content, str), answer


def stop_and_seed(server: Server) -> None:
    client = connect(server)

    def ask(**fields: Any) -> Any:
        return client.chat.completions.create(model=server.model, messages=TEXT, max_tokens=MAX_TOKENS, **fields)

    stopped = ask(temperature=0, stop=[" 5"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("2 3 4", "stop"), stopped
    cut = ask(temperature=0, extra_body={"ignore_eos": True, "max_tokens": 5})
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 5), cut
    hot = [ask(temperature=1.5, seed=11).choices[0].message.content for _ in range(2)]
    assert hot[0] == hot[1], "the same seed must give the same answer"


def penalties(server: Server) -> None:
    """With the greatest penalties, fewer tokens come again."""

    def distinct(penalty: float) -> int:
        answer = connect(server).chat.completions.create(
            model=server.model,
            messages=TEXT,
            temperature=0,
            max_tokens=40,
            presence_penalty=penalty,
            frequency_penalty=penalty,
            extra_body={"ignore_eos": True},
        )
        return len(set((answer.choices[0].message.content or "").split()))

    assert distinct(2) > distinct(0)


def several_choices(server: Server) -> None:
    client = connect(server)
    messages = chat_messages(questions(1)[0])
    one = client.chat.completions.create(model=server.model, messages=messages, max_tokens=8, temperature=0)
    three = client.chat.completions.create(model=server.model, messages=messages, max_tokens=8, temperature=0, n=3)
    assert [choice.index for choice in three.choices] == [0, 1, 2], three
    contents = {choice.message.content for choice in three.choices}
    assert contents == {one.choices[0].message.content}, "greedy choices must be equal"
    assert one.usage is not None
    assert three.usage is not None
    assert three.usage.prompt_tokens == one.usage.prompt_tokens, "the prompt counts once"
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens, three.usage

    texts = {0: "", 1: "", 2: ""}
    ends: dict[int, str] = {}
    for chunk in client.chat.completions.create(
        model=server.model, messages=messages, max_tokens=8, temperature=0, n=3, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    assert set(texts.values()) == contents, texts
    assert sorted(ends) == [0, 1, 2], ends


def log_probabilities(server: Server) -> None:
    client = connect(server)
    for top in (0, 3):
        answer = client.chat.completions.create(
            model=server.model,
            messages=TEXT,
            temperature=0,
            max_tokens=5,
            logprobs=True,
            top_logprobs=top or None,
        )
        choice = answer.choices[0]
        assert choice.logprobs is not None, choice
        tokens = choice.logprobs.content
        assert tokens is not None, choice
        assert answer.usage is not None
        assert len(tokens) == answer.usage.completion_tokens == 5, (tokens, answer.usage)
        assert "".join(token.token for token in tokens) == choice.message.content, choice
        for token in tokens:
            assert -20 < token.logprob <= 0, token
            assert bytes(token.bytes or []).decode() == token.token, token
            assert len(token.top_logprobs) == top, token
            assert not top or token.top_logprobs[0].token == token.token, "the greedy token is the likeliest"
            assert sum(math.exp(likely.logprob) for likely in token.top_logprobs) <= 1.001, token
        streamed = client.chat.completions.create(
            model=server.model,
            messages=TEXT,
            temperature=0,
            max_tokens=5,
            logprobs=True,
            top_logprobs=top or None,
            stream=True,
        )
        logprobs = [part.logprobs for chunk in streamed for part in chunk.choices if part.logprobs]
        seen = [token.token for part in logprobs for token in part.content or []]
        assert seen == [token.token for token in tokens], (seen, tokens)


CHECKS = (
    models,
    answers,
    stream,
    stream_with_usage_in_every_chunk,
    stream_events,
    stream_that_is_left,
    many_at_once,
    conversation,
    stop_and_seed,
    penalties,
    several_choices,
    log_probabilities,
)
