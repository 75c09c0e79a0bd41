"""The encode stage: each item computed once, a bad one fails alone, and memory that is leased is waited for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.stages.nodes import BAD, EMBED_BYTES, POISON, POOL_EMBEDS, EncodeNode, item_to_encode
from triptych.handoff.embedding import fetch_embedding
from triptych.messages import EmbeddingPublished, EncodeSource, ItemEncoded, ItemFailed


@pytest.fixture
def node() -> Iterator[EncodeNode]:
    node = EncodeNode()
    yield node
    node.close()


def sources(node: EncodeNode) -> list[tuple[str, str, EncodeSource]]:
    return [(m.request_id, m.mm_hash, m.source) for m in node.mail.of(ItemEncoded)]


def failures(node: EncodeNode) -> list[tuple[str, str, bool]]:
    return [(m.request_id, m.mm_hash, m.bad_media) for m in node.mail.of(ItemFailed)]


def test_the_embedding_is_published_to_its_consumer_and_the_router_is_told(node: EncodeNode) -> None:
    node.ask("r", item_to_encode("x", 4, b"\x07"))
    node.run()
    assert [receiver for receiver, _ in node.mail.sent] == ["prefill-0", "router"]
    (published,) = node.mail.of(EmbeddingPublished)
    assert (published.request_id, published.attempt, published.mm_hash) == ("r", 0, "x")
    assert torch.equal(fetch_embedding(node.consumer.transport, published.handle).land(), torch.full((4, 16), 7.0))
    assert len(node.leases) == 1


def test_preparing_without_demand_never_runs_the_tower(node: EncodeNode) -> None:
    node.prepare("r", item_to_encode("x"))
    node.run()
    assert node.preprocessed == ["x"]
    assert (node.tower.batches, node.mail.sent, node.stage.num_live()) == ([], [], 0)


def test_two_requests_for_one_item_lead_to_one_forward(node: EncodeNode) -> None:
    for name in "ab":
        node.ask(name, item_to_encode("x"))
    node.run()
    assert node.tower.batches == [[4]]
    assert node.preprocessed == ["x"]
    assert sources(node) == [("a", "x", EncodeSource.FORWARD), ("b", "x", EncodeSource.SINGLE_FLIGHT)]


def test_an_item_twice_in_one_demand_is_encoded_once(node: EncodeNode) -> None:
    node.prepare("r", item_to_encode("x"))
    node.demand("r", "x")
    node.demand("r", "x")
    node.run()
    assert node.tower.batches == [[4]]


def test_a_later_request_is_served_from_the_cache(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x"))
    node.run()
    node.clock.advance(1.0)
    node.ask("b", item_to_encode("x"))
    node.run()
    assert node.tower.batches == [[4]]
    assert node.preprocessed == ["x"]
    assert sources(node)[1:] == [("b", "x", EncodeSource.ENCODER_CACHE)]
    counters = node.stage.counters
    assert (counters["encoder_cache_hits_total"], counters["encoder_cache_misses_total"]) == (1, 1)


def test_durations_say_what_was_queue_and_what_was_forward(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x"))
    node.clock.advance(3.0)
    node.run()
    (message,) = node.mail.of(ItemEncoded)
    assert (message.queue_s, message.encode_s) == (3.0, 1.0)


# -- batches -----------------------------------------------------------------------------------------------------------


def test_items_of_several_requests_share_a_forward(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x", 4), item_to_encode("y", 3))
    node.ask("b", item_to_encode("z", 5))
    node.run()
    assert node.tower.batches == [[4, 3, 5]]


def test_a_forward_returns_no_more_than_the_budget_of_embeds(node: EncodeNode) -> None:
    node.ask("a", *(item_to_encode(name, 7) for name in "vwxyz"))
    node.run()
    assert node.tower.batches == [[7, 7], [7, 7], [7]]


def test_an_item_larger_than_the_budget_runs_alone(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x", 30), item_to_encode("y", 2), item_to_encode("z", 2))
    node.run()
    assert node.tower.batches == [[30], [2, 2]]


# -- failures ----------------------------------------------------------------------------------------------------------


def test_s5_a_bad_image_fails_only_itself_and_says_so(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("bad", content=BAD))
    node.ask("b", item_to_encode("x"))
    node.run()
    assert failures(node) == [("a", "bad", True)]
    assert node.mail.of(ItemFailed)[0].message == "the image is broken"
    assert sources(node) == [("b", "x", EncodeSource.FORWARD)]
    assert node.stage.num_live() == 0


def test_s5_a_poisoned_batch_is_run_one_by_one(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x", 4))
    node.ask("b", item_to_encode("poison", 3, POISON))
    node.ask("c", item_to_encode("y", 5))
    node.run()
    assert node.tower.batches == [[4, 3, 5], [4], [3], [5]]
    assert failures(node) == [("b", "poison", False)]
    assert {request_id for request_id, _, _ in sources(node)} == {"a", "c"}
    assert node.stage.num_live() == 0


def test_an_item_that_was_never_brought_fails_at_once(node: EncodeNode) -> None:
    node.demand("r", "x")
    assert failures(node) == [("r", "x", False)]


def test_a_failed_item_can_be_asked_for_again_once_its_request_is_gone(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x", content=POISON))
    node.run()
    node.cancel("a")
    node.tower.poisoned = False
    node.ask("b", item_to_encode("x", content=POISON))
    node.run()
    assert sources(node) == [("b", "x", EncodeSource.FORWARD)]


# -- cancel ------------------------------------------------------------------------------------------------------------


def test_a_cancel_forgets_demand_and_media(node: EncodeNode) -> None:
    node.ask("r", item_to_encode("x"))
    node.cancel("r")
    node.run()
    assert (node.tower.batches, node.mail.sent, node.stage.num_live()) == ([], [], 0)
    node.demand("r", "x")
    assert failures(node) == [("r", "x", False)]


def test_a_cancel_leaves_the_item_to_others_that_brought_it(node: EncodeNode) -> None:
    for name in "ab":
        node.ask(name, item_to_encode("x"))
    node.cancel("a")
    node.run()
    assert sources(node) == [("b", "x", EncodeSource.FORWARD)]


def test_a_cancel_of_an_unknown_request_is_harmless(node: EncodeNode) -> None:
    node.cancel("nobody")


# -- memory ------------------------------------------------------------------------------------------------------------


def test_without_room_an_item_waits_for_a_lease_to_end_and_then_goes_on(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x", 40))
    node.run()
    node.ask("b", item_to_encode("y", 40))
    node.run()
    assert [m.mm_hash for m in node.mail.of(EmbeddingPublished)] == ["x"]
    assert node.stage.num_live() == 1
    node.release_all()
    node.run()
    assert [m.mm_hash for m in node.mail.of(EmbeddingPublished)] == ["x", "y"]
    assert node.tower.batches == [[40], [40]]  # it was not computed again
    assert failures(node) == []


def test_an_item_that_waits_for_room_is_not_preprocessed_again(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x", 40))
    node.run()
    node.ask("b", item_to_encode("y", 40))
    node.run()
    node.run()
    assert node.preprocessed == ["x", "y"]


def test_a_lease_that_expires_makes_room_too(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x", 40))
    node.run()
    node.ask("b", item_to_encode("y", 40))
    node.run()
    node.clock.advance(61.0)
    node.leases.expire()
    node.run()
    assert [m.mm_hash for m in node.mail.of(EmbeddingPublished)] == ["x", "y"]


def test_an_item_larger_than_the_pool_fails_clearly(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("huge", POOL_EMBEDS + 1))
    node.run()
    assert failures(node) == [("a", "huge", False)]
    assert "does not fit" in node.mail.of(ItemFailed)[0].message
    node.ask("b", item_to_encode("x"))
    node.run()
    assert sources(node) == [("b", "x", EncodeSource.FORWARD)]


def test_old_embeddings_make_room_for_new_ones(node: EncodeNode) -> None:
    for name in "abcd":
        node.ask(name, item_to_encode(name, 30))
        node.run()
        node.release_all()
        node.mail.take()
    node.ask("again", item_to_encode("d", 30))
    node.ask("again", item_to_encode("a", 30))
    node.run()
    assert len(node.tower.batches) == 5  # d is still there, a is not
    node.stage.tick()
    assert node.stage.counters["encoder_cache_evictions_total"] == 3


def test_an_item_that_was_cached_when_it_was_brought_and_evicted_since_is_computed_again() -> None:
    node = EncodeNode(cache_embeds=8)
    node.ask("a", item_to_encode("x", 8))
    node.run()
    node.prepare("b", item_to_encode("x", 8))
    node.ask("c", item_to_encode("y", 8))
    node.run()
    node.demand("b", "x")
    node.run()
    assert node.preprocessed == ["x", "y", "x"]
    assert node.tower.batches == [[8], [8], [8]]
    node.close()


def test_without_a_cache_memory_is_back_when_the_consumer_is_done() -> None:
    node = EncodeNode(cache_embeds=0)
    node.ask("a", item_to_encode("x", 8), item_to_encode("y", 4))
    node.run()
    assert node.transport.used_bytes == 12 * EMBED_BYTES
    assert node.stage.num_cached_embeds() == 0
    node.release_all()
    assert node.transport.used_bytes == 0
    node.close()


def test_waiting_and_cached_embeds_are_counted_for_the_load(node: EncodeNode) -> None:
    node.ask("a", item_to_encode("x", 8))
    node.ask("b", item_to_encode("x", 8), item_to_encode("y", 3))
    assert (node.stage.num_waiting_embeds(), node.stage.num_cached_embeds()) == (11, 0)
    node.run()
    assert (node.stage.num_waiting_embeds(), node.stage.num_cached_embeds()) == (0, 11)
    assert node.stage.cached_bytes == 11 * EMBED_BYTES
