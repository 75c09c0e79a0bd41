"""Which workers a request gets: KV stays where it is, equal items meet, and a missing stage is named."""

from __future__ import annotations

import pytest

from tests.router.workers import D, E, P, Told, info
from triptych.errors import NoCapacityError
from triptych.messages import BlocksChanged
from triptych.router.plan import make_plan
from triptych.router.prefix_index import PrefixIndex
from triptych.router.registry import CUT_S, FRESH_S
from triptych.types import Grid, ItemMetadata, Load, MediaItem, Modality, Placeholder, Prompt, PromptItem, Stage

PROMPT = Prompt(list(range(100)))


def media(mm_hash: str, num_embeds: int = 4) -> MediaItem:
    return MediaItem(Modality.IMAGE, mm_hash, b"", ItemMetadata(Grid(1, 2, 2 * num_embeds), num_embeds, num_embeds))


def prompt_with(mm_hash: str, offset: int) -> Prompt:
    item = PromptItem(Modality.IMAGE, mm_hash, Placeholder(offset, 4), media(mm_hash).metadata)
    return Prompt(PROMPT.token_ids, [item])


def test_a_worker_of_both_stages_decodes_where_it_prefilled() -> None:
    told = Told(*(info(f"pd{k}", [P, D]) for k in range(4)))
    for k in range(20):
        plan = make_plan(Prompt([k]), "", told.registry, told.prefixes)
        assert plan.decode is plan.prefill
        assert not plan.decode_elsewhere


def test_without_decode_on_the_prefill_worker_the_least_loaded_decode_worker_is_taken() -> None:
    told = Told(info("p0", [P]), info("d0", [D]), info("d1", [D]))
    told.registry.workers()[1].num_inflight_requests = 1
    plan = make_plan(PROMPT, "", told.registry, told.prefixes)
    assert (plan.prefill.name, plan.decode.name, plan.decode_elsewhere) == ("p0", "d1", True)


def test_a_decode_worker_behind_a_cut_link_is_taken_only_where_there_is_no_other() -> None:
    told = Told(info("p0", [P]), info("d0", [D]), info("d1", [D]))

    def decode() -> str:
        return make_plan(PROMPT, "", told.registry, told.prefixes).decode.name

    told.registry.cut("d0", "p0")
    assert decode() == "d1"
    told.clock.advance(1)
    told.registry.cut("p0", "d1")
    assert decode() == "d0"  # cut longer ago
    told.clock.advance(1)
    told.registry.cut("p0", "d0")
    assert decode() == "d1"
    told.registry.reached("d0", "p0")
    assert decode() == "d1"  # it came before the cut, as far as one can know
    told.clock.advance(2 * FRESH_S)
    told.registry.reached("d0", "p0")
    assert decode() == "d0"
    told.registry.cut("p0", "d0")
    told.clock.advance(CUT_S)
    told.registry.workers()[2].num_inflight_requests = 1
    assert decode() == "d0"  # it is tried again


@pytest.mark.parametrize(
    ("workers", "prompt", "missing"),
    [
        ([("e0", [E]), ("d0", [D])], PROMPT, "prefill"),
        ([("e0", [E]), ("p0", [P])], PROMPT, "decode"),
        ([("pd0", [P, D])], prompt_with("x", 3), "encode"),
        ([], PROMPT, "prefill"),
    ],
)
def test_a_missing_stage_is_named(workers: list[tuple[str, list[Stage]]], prompt: Prompt, missing: str) -> None:
    told = Told(*(info(name, stages) for name, stages in workers))
    with pytest.raises(NoCapacityError, match=f"hosts the {missing} stage"):
        make_plan(prompt, "", told.registry, told.prefixes)


def test_a_text_request_needs_no_encode_worker() -> None:
    assert make_plan(PROMPT, "", Told(info("pd0", [P, D])).registry, PrefixIndex(4)).prefill.name == "pd0"


def test_prompts_that_begin_alike_go_to_one_prefill_worker() -> None:
    told = Told(*(info(f"p{k}", [P, D]) for k in range(6)))
    chosen = {
        make_plan(Prompt([*PROMPT.token_ids, k]), "", told.registry, told.prefixes).prefill.name for k in range(20)
    }
    assert len(chosen) == 1


def test_salt_first_tokens_and_early_images_spread_requests() -> None:
    told = Told(*(info(f"p{k}", [E, P, D]) for k in range(6)))

    def spread(prompts: list[tuple[Prompt, str]]) -> int:
        return len({make_plan(prompt, salt, told.registry, told.prefixes).prefill.name for prompt, salt in prompts})

    assert spread([(Prompt([k]), "") for k in range(20)]) > 2
    assert spread([(PROMPT, f"{k}") for k in range(20)]) > 2
    assert spread([(prompt_with(f"{k}", 3), "") for k in range(20)]) > 2
    assert spread([(prompt_with(f"{k}", 90), "") for k in range(20)]) == 1  # too late to be shared anyway


def test_suspect_workers_are_not_planned_with() -> None:
    told = Told(info("pd0", [P, D]), info("pd1", [P, D]))
    told.registry.workers()[0].suspect = "broken"
    assert {make_plan(Prompt([k]), "", told.registry, told.prefixes).prefill.name for k in range(20)} == {"pd1"}


def test_the_worker_that_holds_more_of_the_prompt_is_taken() -> None:
    told = Told(*(info(f"pd{k}", [P, D]) for k in range(4)))
    hashes = told.prefixes.hashes(PROMPT, "")
    for k, num_blocks in enumerate((3, 9, 5)):
        told.prefixes.changed(f"pd{k}-1", BlocksChanged(hashes[:num_blocks], []))
    plan = make_plan(PROMPT, "", told.registry, told.prefixes)
    assert (plan.prefill.name, plan.prefix) == ("pd1", hashes)
    told.prefixes.changed("pd1-1", BlocksChanged([], hashes[1:2]))  # a hole: what follows is of no use
    assert make_plan(PROMPT, "", told.registry, told.prefixes).prefill.name == "pd2"
    assert make_plan(PROMPT, "salt", told.registry, told.prefixes).prefix != hashes


def test_a_cached_prefix_is_weighed_against_the_work_that_waits() -> None:
    told = Told(info("pd0", [P, D]), info("pd1", [P, D]))
    hashes = told.prefixes.hashes(PROMPT, "")
    told.prefixes.changed("pd1-1", BlocksChanged(hashes[:15], []))  # 60 tokens
    told.registry.workers()[1].num_inflight_tokens = 59
    assert make_plan(PROMPT, "", told.registry, told.prefixes).prefill.name == "pd1"
    told.registry.workers()[1].num_inflight_tokens = 61
    assert make_plan(PROMPT, "", told.registry, told.prefixes).prefill.name == "pd0"


def test_a_worker_that_is_slower_gets_less() -> None:
    told = Told(info("pd0", [P, D]), info("pd1", [P, D]))
    slow, fast = told.registry.workers()
    slow.load, fast.load = Load(prompt_token_s=0.004), Load(prompt_token_s=0.001)
    fast.num_inflight_tokens = 200
    assert make_plan(PROMPT, "", told.registry, told.prefixes).prefill.name == "pd1"


def test_requests_that_run_count_too() -> None:
    told = Told(info("pd0", [P, D]), info("pd1", [P, D]))
    told.registry.workers()[0].num_inflight_requests = 3
    assert {make_plan(Prompt([k]), "", told.registry, told.prefixes).prefill.name for k in range(9)} == {"pd1"}
