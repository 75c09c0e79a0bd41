"""Requests of a workload as bytes, made before a round starts so that the client costs little while it measures.

The same seed gives the same requests, whatever the system: only the model's name in front differs.
"""

from __future__ import annotations

import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import msgspec

from triptych.bench.pages import page, words
from triptych.bench.workload import Workload

_ANSWER = "\ue000answer\ue000"  # stands where the answer of an earlier turn goes; of the private use area
_ANSWER_JSON = msgspec.json.encode(_ANSWER)


@dataclass(frozen=True)
class Request:
    """One body, serialized but for the model's name and the answers that earlier turns of its session get."""

    index: int
    kind: str  # text, images or large
    num_images: int  # all of them, those of earlier turns included
    output_tokens: int
    segments: tuple[bytes, ...]  # answers stand between them

    def body(self, model: str, answers: Sequence[str] = ()) -> bytes:
        parts = [b'{"model":', msgspec.json.encode(model), b",", self.segments[0]]
        for answer, segment in zip(answers, self.segments[1:], strict=True):
            parts += [msgspec.json.encode(answer), segment]
        return b"".join(parts)


Session = tuple[Request, ...]  # sent one after the other


@dataclass(frozen=True)
class _Shape:
    """What one request brings of its own."""

    kind: str
    num_images: int
    size: tuple[int, int]


class RequestFactory:
    """Makes the requests of one round. Images that repeat are drawn from those made before, and from the primed."""

    def __init__(self, workload: Workload, seed: int, tokens_per_word: float = 1.0) -> None:
        self._workload = workload
        self._tokens_per_word = tokens_per_word
        self._rng = random.Random(f"{seed}-requests")
        self._indices = count()
        # Not of `seed`: the images of the primers stay the same in every round, as those of a well-known document do.
        primed = random.Random(f"primed-{workload.name}")
        self._seen: list[str] = [self._render(primed, workload.sizes[0]) for _ in range(workload.primed_images)]

    def primers(self) -> list[Session]:
        """Requests that bring every primed image once."""
        step = max(1, self._workload.image_counts[1])
        groups = [self._seen[k : k + step] for k in range(0, self._workload.primed_images, step)]
        return [(self._request([_message(self.text(), group)], "images", len(group)),) for group in groups]

    def sessions(self, num_requests: int) -> list[Session]:
        """At least `num_requests` requests, in sessions of `turns`."""
        turns = self._workload.turns
        num_sessions = -(-num_requests // turns)
        return [self._session(shape) for shape in self._shapes(num_sessions)]

    def _session(self, shape: _Shape) -> Session:
        messages: list[dict[str, Any]] = []
        requests = []
        for turn in range(1, self._workload.turns + 1):
            images = [self._image(shape.size) for _ in range(shape.num_images)]
            messages.append(_message(self.text(), images))
            requests.append(self._request(messages, shape.kind, turn * shape.num_images))
            messages.append({"role": "assistant", "content": _ANSWER})
        return tuple(requests)

    def _shapes(self, num: int) -> list[_Shape]:
        """Exact shares in a random order."""
        load = self._workload
        least, most = load.image_counts
        span = most - least + 1
        num_large = max(1, round(load.share_large * num)) if load.share_large else 0
        num_with = round(load.share_with_images * num) if most else 0
        shapes = []
        for k in range(num):
            if k < num_large:
                shapes.append(_Shape("large", load.large_images, load.large_size))
            elif k < max(num_with, num_large):
                images, size = least + k % span, load.sizes[k // span % len(load.sizes)]
                shapes.append(_Shape("images" if images else "text", images, size))
            else:
                shapes.append(_Shape("text", 0, load.sizes[0]))
        self._rng.shuffle(shapes)
        return shapes

    def _image(self, size: tuple[int, int]) -> str:
        if self._seen and self._rng.random() < self._workload.share_repeated:
            return self._rng.choice(self._seen)
        url = self._render(self._rng, size)
        if self._workload.share_repeated:
            self._seen.append(url)
        return url

    def _render(self, rng: random.Random, size: tuple[int, int]) -> str:
        form = self._workload.image_format
        return f"data:image/{form.lower()};base64,{base64.b64encode(page(rng, size, form)).decode()}"

    def text(self) -> str:
        """Begins with a number of its own, so that no prefix cache of another request covers what follows."""
        num_words = max(1, round(self._workload.prompt_tokens / self._tokens_per_word))
        return f"{self._rng.getrandbits(32):08x} {words(self._rng, num_words)}"

    def _request(self, messages: list[dict[str, Any]], kind: str, num_images: int) -> Request:
        body = {"messages": messages, **sampling(self._workload.output_tokens)}
        segments = msgspec.json.encode(body).removeprefix(b"{").split(_ANSWER_JSON)
        return Request(next(self._indices), kind, num_images, self._workload.output_tokens, tuple(segments))


def sampling(output_tokens: int) -> dict[str, Any]:
    """Greedy, streamed, and exactly so many tokens."""
    return {
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def text_request(text: str, output_tokens: int) -> Request:
    """A request outside of any workload."""
    body = {"messages": [_message(text, [])], **sampling(output_tokens)}
    return Request(0, "text", 0, output_tokens, (msgspec.json.encode(body).removeprefix(b"{"),))


def _message(text: str, images: Sequence[str]) -> dict[str, Any]:
    parts = [{"type": "text", "text": text}, *({"type": "image_url", "image_url": {"url": url}} for url in images)]
    return {"role": "user", "content": parts}
