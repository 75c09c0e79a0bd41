"""Which workers a request gets: KV stays where it is, equal items meet, and a missing stage is named."""

from __future__ import annotations

import pytest

from tests.router.workers import D, E, P, Told, info
from triptych.errors import NoCapacityError
from triptych.router.plan import choose_encoder, make_plan
from triptych.types import Grid, ItemMetadata, MediaItem, Modality, Placeholder, Prompt, PromptItem, Stage

PROMPT = Prompt(list(range(100)))


def media(mm_hash: str, num_embeds: int = 4) -> MediaItem:
    return MediaItem(Modality.IMAGE, mm_hash, b"", ItemMetadata(Grid(1, 2, 2 * num_embeds), num_embeds, num_embeds))


def prompt_with(mm_hash: str, offset: int) -> Prompt:
    item = PromptItem(Modality.IMAGE, mm_hash, Placeholder(offset, 4), media(mm_hash).metadata)
    return Prompt(PROMPT.token_ids, [item])


def test_a_worker_of_both_stages_decodes_where_it_prefilled() -> None:
    told = Told(*(info(f"pd{k}", [P, D]) for k in range(4)))
    for k in range(20):
        plan = make_plan(Prompt([k]), [], "", told.registry)
        assert plan.decode is plan.prefill
        assert not plan.decode_elsewhere


def test_without_decode_on_the_prefill_worker_the_least_loaded_decode_worker_is_taken() -> None:
    told = Told(info("p0", [P]), info("d0", [D]), info("d1", [D]))
    told.registry.workers()[1].num_inflight_requests = 1
    plan = make_plan(PROMPT, [], "", told.registry)
    assert (plan.prefill.name, plan.decode.name, plan.decode_elsewhere) == ("p0", "d1", True)


@pytest.mark.parametrize(
    ("workers", "items", "missing"),
    [
        ([("e0", [E]), ("d0", [D])], [], "prefill"),
        ([("e0", [E]), ("p0", [P])], [], "decode"),
        ([("pd0", [P, D])], [media("x")], "encode"),
        ([], [], "prefill"),
    ],
)
def test_a_missing_stage_is_named(workers: list[tuple[str, list[Stage]]], items: list[MediaItem], missing: str) -> None:
    told = Told(*(info(name, stages) for name, stages in workers))
    with pytest.raises(NoCapacityError, match=f"hosts the {missing} stage"):
        make_plan(PROMPT, items, "", told.registry)


def test_a_text_request_needs_no_encode_worker() -> None:
    assert make_plan(PROMPT, [], "", Told(info("pd0", [P, D])).registry).encoders == {}


def test_an_item_that_repeats_has_one_encode_worker() -> None:
    told = Told(info("e0", [E]), info("e1", [E]), info("pd0", [P, D]))
    plan = make_plan(PROMPT, [media("x"), media("y"), media("x")], "", told.registry)
    assert sorted(plan.encoders) == ["x", "y"]


def test_prompts_that_begin_alike_go_to_one_prefill_worker() -> None:
    told = Told(*(info(f"p{k}", [P, D]) for k in range(6)))
    chosen = {make_plan(Prompt([*PROMPT.token_ids, k]), [], "", told.registry).prefill.name for k in range(20)}
    assert len(chosen) == 1


def test_salt_first_tokens_and_early_images_spread_requests() -> None:
    told = Told(*(info(f"p{k}", [P, D]) for k in range(6)))

    def spread(prompts: list[tuple[Prompt, str]]) -> int:
        return len({make_plan(prompt, [], salt, told.registry).prefill.name for prompt, salt in prompts})

    assert spread([(Prompt([k]), "") for k in range(20)]) > 2
    assert spread([(PROMPT, f"{k}") for k in range(20)]) > 2
    assert spread([(prompt_with(f"{k}", 3), "") for k in range(20)]) > 2
    assert spread([(prompt_with(f"{k}", 90), "") for k in range(20)]) == 1  # too late to be shared anyway


def test_many_items_of_one_request_are_spread_over_encode_workers() -> None:
    told = Told(info("e0", [E]), info("e1", [E]), info("pd0", [P, D]))
    plan = make_plan(PROMPT, [media(f"{k}") for k in range(8)], "", told.registry)
    names = [encoder.name for encoder in plan.encoders.values()]
    assert min(names.count("e0"), names.count("e1")) >= 3


def test_an_encode_worker_that_failed_is_avoided_unless_there_is_no_other() -> None:
    told = Told(info("e0", [E]), info("e1", [E]))
    assert choose_encoder(media("x"), told.registry, {}, frozenset({"e0"})).name == "e1"
    assert choose_encoder(media("x"), told.registry, {}, frozenset({"e1"})).name == "e0"
    told.registry.lost("e1")
    assert choose_encoder(media("x"), told.registry, {}, frozenset({"e0"})).name == "e0"


def test_suspect_workers_are_not_planned_with() -> None:
    told = Told(info("pd0", [P, D]), info("pd1", [P, D]))
    told.registry.workers()[0].suspect = "broken"
    assert {make_plan(Prompt([k]), [], "", told.registry).prefill.name for k in range(20)} == {"pd1"}
