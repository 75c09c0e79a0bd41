"""The bytes of each message, kept in `messages/golden.json`: a change of the wire format must be meant.

`python -m tests.test_messages` writes the file anew; raise PROTOCOL_VERSION with it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from triptych import messages
from triptych.messages import Body
from triptych.types import (
    FinishReason,
    Grid,
    Heartbeat,
    ImageDecoding,
    ImageSize,
    ItemMetadata,
    Load,
    Modality,
    Placeholder,
    PromptItem,
    Rgb,
    SamplingParams,
    Stage,
    WeightsReport,
    WorkerAddress,
    WorkerInfo,
)

GOLDEN = Path(__file__).parent / "messages" / "golden.json"

ADDRESS = WorkerAddress("prefill-0", "0123456789abcdef", "ipc:///run/triptych/p.sock", "/run/triptych/p.pool")
METADATA = ItemMetadata(Grid(1, 4, 6), 6, 7)
DECODING = ImageDecoding(ImageSize(640, 480), Rgb(255, 128, 0))
ITEM = PromptItem(Modality.IMAGE, "ab" * 32, Placeholder(3, 7), METADATA)
SAMPLING = SamplingParams(
    max_tokens=5, temperature=0.5, top_p=0.9, top_k=4, min_p=0.1, seed=2**63, min_tokens=1, stop_token_ids=[2, 3],
    ignore_eos=True,
)  # fmt: skip
ABOUT = ("request-1", 2)
RANGES = [messages.Range(64, 4096), messages.Range(8192, 4096)]

EXAMPLES: list[Body] = [
    messages.PrepareItems(
        *ABOUT, items=[messages.ItemToEncode(Modality.IMAGE, "ab" * 32, b"\x89PNG\r\n\x00", METADATA, DECODING)]
    ),
    messages.EncodeItems(*ABOUT, mm_hashes=["ab" * 32], consumer=ADDRESS),
    messages.ItemEncoded(
        *ABOUT, mm_hash="ab" * 32, source=messages.EncodeSource.SINGLE_FLIGHT, queue_s=0.5, encode_s=0.25
    ),
    messages.ItemFailed(*ABOUT, mm_hash="ab" * 32, message="it cannot be decoded", bad_media=True),
    messages.Prefill(
        *ABOUT, token_ids=[1, 2, 320, 70000], num_output_tokens=1, items=[ITEM], sampling=SAMPLING, cache_salt="s",
        priority=-1, decode_elsewhere=True,
    ),
    messages.Decode(
        *ABOUT, token_ids=[1, 2], num_output_tokens=0, items=[ITEM], sampling=SAMPLING, cache_salt="",
        priority=0, source=ADDRESS
    ),
    messages.Accepted(*ABOUT, num_cached_tokens=16, needed=["ab" * 32]),
    messages.Refused(*ABOUT, reason=messages.Refusal.TOO_LONG, message="too long"),
    messages.EmbeddingsNeeded(*ABOUT, mm_hashes=["ab" * 32]),
    messages.ItemHeld(*ABOUT, mm_hash="ab" * 32, transfer_s=0.125),
    messages.ItemLost(*ABOUT, mm_hash="ab" * 32, owner="encode-0", message="cut"),
    messages.StepOutput(
        outputs=[
            messages.TokenOutput(*ABOUT, index=0, token_ids=[7]),
            messages.TokenOutput(
                *ABOUT, index=1, token_ids=[8, 9], finish_reason=FinishReason.STOP, stop_token_id=9,
                prefill=messages.PrefillTiming(1.0, 2.0, 4.0, "ab" * 32), decode=messages.DecodeTiming(0.5, 0.25),
                logprobs=[messages.Logprobs([8, 7], [-0.5, -0.25], 2)],
                prompt_logprobs=[messages.Logprobs([1], [-0.125], 1)],
            ),
        ]
    ),
    messages.AttemptFailed(*ABOUT, message="too complex", retryable=False, bad_grammar=True),
    messages.Cancel(*ABOUT),
    messages.EmbeddingPublished(
        *ABOUT, mm_hash="ab" * 32,
        handle=messages.EmbeddingHandle(3, ADDRESS, RANGES[0], (6, 256), "bfloat16", 2**64 - 1),
    ),
    messages.FetchKV(*ABOUT, consumer=ADDRESS),
    messages.KVPublished(
        *ABOUT, handle=messages.KVHandle(4, ADDRESS, 2, RANGES, [1, 2**64 - 1]), num_tokens=63, first_token_id=11
    ),
    messages.KVRefused(*ABOUT, message="gone"),
    messages.LeaseReleased(lease_id=4),
    messages.Probe(probe_id=1),
    messages.Probed(probe_id=1, error="broken"),
    messages.PeerLost(name="encode-0", epoch="fedcba9876543210"),
    messages.Drain(),
    messages.LinkLost(name="encode-0", epoch="fedcba9876543210"),
    messages.Register(
        WorkerInfo(
            WorkerAddress("e", "00", "tcp://10.0.0.1:7000", "/run/e.pool", "10.0.0.1:7001", "k" * 40), [Stage.ENCODE],
            "v", "demo", 100, WeightsReport(1, 2, 3, 4, 0.5), pid=1, cores=[0], kv_layout="rows",
            kernels={"language": "torch"}, supervised=True,
        )
    ),
    messages.Beat(Heartbeat("e", "00", Load(num_waiting=1), {"encode_items_total": 2.0}, True)),
    messages.Leave(name="e", epoch="00"),
    messages.Answer(status=409, message="another model"),
    messages.ListBlocks(),
    messages.BlocksChanged(stored=[bytes(range(16))], removed=[bytes(16)], is_all=True),
]  # fmt: skip


def name_of(body: Body) -> str:
    return type(body).__name__


def golden() -> dict[str, str]:
    content: dict[str, str] = json.loads(GOLDEN.read_text())
    return content


def encoded(body: Body) -> bytes:
    return messages.encode(body, "prefill-0", "0123456789abcdef")


@pytest.mark.parametrize("body", EXAMPLES, ids=name_of)
def test_the_bytes_of_each_message_are_as_agreed(body: Body) -> None:
    assert encoded(body).hex() == golden()[name_of(body)]


@pytest.mark.parametrize("body", EXAMPLES, ids=name_of)
def test_each_message_comes_back_as_it_was(body: Body) -> None:
    envelope = messages.decode(bytes.fromhex(golden()[name_of(body)]))
    assert envelope == messages.Envelope(messages.PROTOCOL_VERSION, "prefill-0", "0123456789abcdef", body)


def test_every_message_has_golden_bytes() -> None:
    """Fails when a message is added to `Body` without an example here."""
    kinds = {kind.__name__ for kind in get_args(Body)}
    assert kinds == {name_of(body) for body in EXAMPLES} == set(golden())


def test_every_message_is_in_the_page_on_the_protocol() -> None:
    page = (Path(__file__).parent.parent / "docs" / "protocol.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(kind.__name__ for kind in get_args(Body))


def test_an_unknown_message_is_refused() -> None:
    frame = msgspec.msgpack.encode([messages.PROTOCOL_VERSION, "w", "e", {"type": "Reboot"}])
    with pytest.raises(msgspec.DecodeError, match="Reboot"):
        messages.decode(frame)


@pytest.mark.parametrize("frame", [b"", b"\x00", b"not msgpack", msgspec.msgpack.encode({"type": "Drain"})])
def test_what_is_no_envelope_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        messages.decode(frame)


def test_a_message_that_lacks_a_field_is_refused() -> None:
    frame = msgspec.msgpack.encode([messages.PROTOCOL_VERSION, "w", "e", {"type": "Cancel", "request_id": "r"}])
    with pytest.raises(msgspec.DecodeError, match="attempt"):
        messages.decode(frame)


def test_another_version_is_visible_to_the_receiver() -> None:
    frame = msgspec.msgpack.encode(messages.Envelope(messages.PROTOCOL_VERSION + 1, "w", "e", messages.Drain()))
    assert messages.decode(frame).version == messages.PROTOCOL_VERSION + 1


def test_the_version_hash_tells_unlike_builds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = messages.version_hash("f", 16)
    assert ours == messages.version_hash("f", 16)
    others = {messages.version_hash("g", 16), messages.version_hash("f", 32)}
    monkeypatch.setattr(messages, "PROTOCOL_VERSION", messages.PROTOCOL_VERSION + 1)
    assert len({ours, *others, messages.version_hash("f", 16)}) == 4


@pytest.mark.parametrize("reason", list(messages.Refusal))
def test_only_a_prompt_that_is_too_long_or_impossible_is_refused_for_good(reason: messages.Refusal) -> None:
    assert reason.retryable == (reason not in (messages.Refusal.TOO_LONG, messages.Refusal.INVALID))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name_of(body): encoded(body).hex() for body in EXAMPLES}, indent=1) + "\n")
