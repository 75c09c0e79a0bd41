"""What the router does not believe of a worker."""

from __future__ import annotations

import math

import pytest

from triptych.messages import (
    Accepted,
    AttemptFailed,
    DecodeTiming,
    EmbeddingsNeeded,
    EncodeSource,
    ItemEncoded,
    ItemFailed,
    ItemHeld,
    ItemLost,
    Logprobs,
    PrefillTiming,
    RequestMessage,
    TokenOutput,
)
from triptych.router.checks import why_impossible

ABOUT = ("r", 0)
OF = EncodeSource.FORWARD


@pytest.mark.parametrize(
    "message",
    [
        Accepted(*ABOUT, 19, ["a"]),
        EmbeddingsNeeded(*ABOUT, ["a", "b"]),
        ItemEncoded(*ABOUT, "a", OF, 0.0, 1.5),
        AttemptFailed(*ABOUT, "no", True),
        TokenOutput(*ABOUT, 0, [7, 8], prefill=PrefillTiming(0, 1, 2), logprobs=[Logprobs([7], [-0.5], 1)] * 2),
    ],
)
def test_what_can_be(message: RequestMessage | TokenOutput) -> None:
    assert why_impossible(message, {"a", "b"}, 20) == ""


@pytest.mark.parametrize(
    "message",
    [
        Accepted(*ABOUT, -1, []),
        Accepted(*ABOUT, 20, []),
        Accepted(*ABOUT, 0, ["c"]),
        EmbeddingsNeeded(*ABOUT, ["a", "c"]),
        ItemEncoded(*ABOUT, "c", OF, 0.0, 0.0),
        ItemEncoded(*ABOUT, "a", OF, math.nan, 0.0),
        ItemHeld(*ABOUT, "a", math.inf),
        ItemHeld(*ABOUT, "a", -1.0),
        ItemFailed(*ABOUT, "c", "", False),
        ItemLost(*ABOUT, "c", "encode-0", ""),
        TokenOutput(*ABOUT, -1, [7]),
        TokenOutput(*ABOUT, 0, []),
        TokenOutput(*ABOUT, 0, [-7]),
        TokenOutput(*ABOUT, 0, [2**31]),
        TokenOutput(*ABOUT, 0, [7], prefill=PrefillTiming(math.nan, 0, 0)),
        TokenOutput(*ABOUT, 0, [7], decode=DecodeTiming(0, -1.0)),
        TokenOutput(*ABOUT, 0, [7], logprobs=[Logprobs([7], [-0.5], 1)] * 2),
        TokenOutput(*ABOUT, 0, [7], logprobs=[Logprobs([7, 8], [-0.5], 1)]),
    ],
)
def test_what_cannot_be(message: RequestMessage | TokenOutput) -> None:
    assert why_impossible(message, {"a", "b"}, 20)
