"""Bodies of every POST route that are valid but for something: `python -m tests.fuzz.chat --seconds 600 --seed 1`."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
from PIL import Image

from tests.fuzz.running import main

MAX_TOKENS = 8  # of most answers: long ones find nothing more
MAX_CHOICES = 4
Path = tuple[str | int, ...]

ODD_TEXTS = [
    "", " ", "\x00", "\ud800", "\udfff\ud800", "a\u0301" * 50, "\u202e\u200d\ufeff", "👩‍👩‍👧" * 9, "<|im_end|>",
    "<|image_pad|>", "<|vision_start|>", "{{ 7 * 7 }}", "{% raw %}", "true", "null", "1e999", "../../etc/passwd",
    "data:", "data:image/png;base64,!!", "file:///etc/hostname", "http://169.254.169.254/", "x" * 5000,
]  # fmt: skip
ODD_NUMBERS = [
    0, -1, 1, 2, 7, 127, 128, 129, 2**31, 2**63 - 1, 2**63, -(2**63), 10**40, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308,
]  # fmt: skip
FIELDS: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "max_tokens": [1, 2, 8],
    "max_completion_tokens": [3],
    "temperature": [0, 0.7, 2],
    "top_p": [0.1, 1],
    "top_k": [-1, 0, 5],
    "min_p": [0.1],
    "seed": [1, -5],
    "stop": ["a", ["b", "c"]],
    "stop_token_ids": [[5, 6]],
    "include_stop_str_in_output": [True],
    "ignore_eos": [True, False],
    "min_tokens": [1],
    "presence_penalty": [1.5],
    "frequency_penalty": [-1.5],
    "repetition_penalty": [1.3],
    "logit_bias": [{"5": 3, "9": -100}],
    "allowed_token_ids": [[5, 6, 7]],
    "bad_words": [["What", "is it"]],
    "logprobs": [True, 2],
    "top_logprobs": [3],
    "prompt_logprobs": [0, 2],
    "skip_special_tokens": [False],
    "add_special_tokens": [True, False],
    "add_generation_prompt": [True, False],
    "continue_final_message": [True],
    "truncate_prompt_tokens": [-1, 5, 30],
    "truncation_side": ["right"],
    "echo": [True],
    "stream": [True, False],
    "stream_options": [{"include_usage": True, "continuous_usage_stats": True}],
    "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {"type": "null"}}}],
    "structured_outputs": [{"regex": "[0-9]+"}, {"choice": ["yes", "no"]}, {"grammar": "root ::= 'a'"}],
    "guided_json": [{"type": "object", "properties": {"a": {"type": "integer"}}}],
    "tools": [[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}],
    "parallel_tool_calls": [False],
    "chat_template_kwargs": [{"x": [1, {"y": "z"}]}],
    "documents": [[{"title": "t", "text": "d"}]],
    "mm_processor_kwargs": [{"max_pixels": 10_000}],
    "media_io_kwargs": [{"image": {"background": "#000000"}}],
    "cache_salt": ["s"],
    "priority": [-3, 0],
    "request_id": ["r-1"],
    "session_id": ["s-1"],
    "return_token_ids": [True],
    "return_tokens_as_token_ids": [True],
    "timing": [True],
    "user": ["me"],
    "instructions": ["be brief"],
    "max_output_tokens": [4],
    "text": [{"format": {"type": "json_object"}}],
    "metadata": [{"a": "b"}],
    "include": [["message.output_text.logprobs"]],
}


def _picture(width: int, height: int) -> str:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 90)).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


PICTURES = [_picture(60, 40), _picture(33, 97)]


def valid(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A route and a body that it would most likely accept."""
    picture = {"type": "image_url", "image_url": {"url": rng.choice(PICTURES)}, "uuid": rng.choice(["u", None])}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [picture, {"type": "text", "text": "What is it?"}, "bare"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5"}, picture]},
        {"role": "user", "content": "What is 2 plus 3?"},
    ]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "5"},
    ]
    prompts: list[Any] = ["What is", ["a", "b"], [5, 6, 7], [[5, 6], [7]]]
    routes: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": rng.sample(messages, rng.randint(1, len(messages)))}),
        ("/v1/completions", {"prompt": rng.choice(prompts)}),
        ("/v1/responses", {"input": rng.choice(["hi", items])}),
        ("/tokenize", rng.choice([{"prompt": "What is"}, {"messages": messages}])),
        ("/detokenize", {"tokens": [5, 6, 7]}),
    ]
    path, body = rng.choices(routes, [6, 2, 2, 1, 1])[0]
    fields = rng.sample(sorted(FIELDS), rng.randint(0, 6))
    return path, json.loads(
        json.dumps({"model": "demo", **body, **{name: rng.choice(FIELDS[name]) for name in fields}})
    )


# -- damage ------------------------------------------------------------------------------------------------------------


def places(value: Any, at: Path = ()) -> list[Path]:
    found = [at]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*at, key))
    elif isinstance(value, list):
        for k, inner in enumerate(value):
            found += places(inner, (*at, k))
    return found


def odd_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind <= 2:
        return rng.choice(ODD_NUMBERS)
    if kind <= 4:
        return rng.choice(ODD_TEXTS)
    if kind == 5:
        return [odd_value(rng, depth + 1) for _ in range(rng.randint(0, 3))]
    if kind == 6:
        return {rng.choice([*ODD_TEXTS, *FIELDS]): odd_value(rng, depth + 1) for _ in range(rng.randint(0, 3))}
    deep: Any = rng.choice(ODD_TEXTS)
    for _ in range(rng.choice([5, 90, 400])):
        deep = rng.choice([[deep], {"a": deep}])
    return deep


def damage(body: dict[str, Any], rng: random.Random) -> None:
    """One change at a random place."""
    *way, last = rng.choice(places(body)[1:] or [("zzz",)])
    holder: Any = body
    for step in way:
        holder = holder[step]
    kind = rng.randrange(5) if body else 4
    if kind == 0:
        del holder[last]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(int(last), holder[int(last)])
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice([*FIELDS, "zzz", "type", "content"])] = odd_value(rng)
    else:
        holder[last] = odd_value(rng)


def bound(body: dict[str, Any]) -> None:
    """Keep answers short, so that more requests fit into a run."""
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        value = body.get(name)
        if type(value) is int and value > MAX_TOKENS:
            body[name] = value if value > 4096 else MAX_TOKENS
    if all(body.get(name) is None for name in ("max_tokens", "max_completion_tokens")):
        body["max_tokens"] = MAX_TOKENS
    if "input" in body and body.get("max_output_tokens") is None:
        body["max_output_tokens"] = MAX_TOKENS
    if type(body.get("n")) is int and MAX_CHOICES < body["n"] <= 128:
        body["n"] = MAX_CHOICES


def raw_damage(text: str, rng: random.Random) -> bytes:
    """Of the bytes, seldom: JSON that is none, or barely."""
    data = text.encode(errors="surrogatepass")
    at = rng.randrange(len(data))
    choices: list[Callable[[], bytes]] = [
        lambda: data[:at],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
        lambda: (
            data[:at] + rng.choice([b"NaN", b"Infinity", b"-", b"\\ud800", b"\xff", b"{", b"]", b"\x00"]) + data[at:]
        ),
        lambda: b"[" * 10_000 + data,
        lambda: b'{"messages":' * 5_000,
    ]
    return rng.choice(choices)()


def request(rng: random.Random) -> tuple[str, bytes]:
    path, body = valid(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        damage(body, rng)
    bound(body)
    try:
        text = json.dumps(body)
    except RecursionError:  # one deep value in another: more than Python writes
        return request(rng)
    return path, raw_damage(text, rng) if rng.random() < 0.05 else text.encode()


async def ask(client: httpx.AsyncClient, rng: random.Random) -> httpx.Response:
    path, content = request(rng)
    return await client.post(path, content=content, headers={"content-type": "application/json"})


if __name__ == "__main__":
    main(ask, __doc__ or "")
