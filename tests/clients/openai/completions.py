"""Plain completions: one prompt and several, whole and streamed, echoed, with log probabilities."""

from __future__ import annotations

from tests.clients.openai.connect import connect
from tests.clients.script import Server

PROMPT = "<|im_start|>user\nCount from 2 to 7.<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "2 3 4 5 6 7"


def completion(server: Server) -> None:
    answer = connect(server).completions.create(model=server.model, prompt=PROMPT, temperature=0, max_tokens=32)
    assert answer.object == "text_completion", answer
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, ANSWER, "stop"), choice
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens, answer


def completion_stream(server: Server) -> None:
    chunks = list(
        connect(server).completions.create(
            model=server.model,
            prompt=PROMPT,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    choices = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == ANSWER, chunks
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"], chunks
    assert chunks[-1].usage is not None, chunks[-1]


def completions_of_several_prompts(server: Server) -> None:
    client = connect(server)
    other = PROMPT.replace("from 2 to 7", "from 0 to 3")
    answer = client.completions.create(model=server.model, prompt=[PROMPT, other], temperature=0, max_tokens=32)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, ANSWER), (1, "0 1 2 3")], answer
    twice = client.completions.create(model=server.model, prompt=[PROMPT, other], temperature=0, max_tokens=32, n=2)
    assert [choice.text for choice in twice.choices] == [ANSWER, ANSWER, "0 1 2 3", "0 1 2 3"], twice


def echo_and_log_probabilities(server: Server) -> None:
    client = connect(server)
    text = "What is 2 plus 3?"
    echoed = client.completions.create(model=server.model, prompt=text, temperature=0, max_tokens=4, echo=True)
    assert echoed.choices[0].text.startswith(text), echoed
    answer = client.completions.create(model=server.model, prompt=PROMPT, temperature=0, max_tokens=4, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None, answer
    tokens, logprobs, likely, offsets = found.tokens, found.token_logprobs, found.top_logprobs, found.text_offset
    assert tokens is not None, found
    assert "".join(tokens) == answer.choices[0].text, found
    assert logprobs is not None, found
    assert all(value <= 0 for value in logprobs), found
    assert likely is not None, found
    assert len(likely) == len(tokens) == len(logprobs) == 4, found
    assert all(len(top) in (2, 3) and token in top for token, top in zip(tokens, likely, strict=True)), found
    assert offsets is not None, found
    lengths = [sum(len(token) for token in tokens[:k]) for k in range(4)]
    assert [offset - offsets[0] for offset in offsets] == lengths, found


CHECKS = (completion, completion_stream, completions_of_several_prompts, echo_and_log_probabilities)
