"""Prompts that no template touches, prompts that go on with a message, and prompts that are cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from triptych.errors import BadRequestError
from triptych.prompt.layout import PromptBuilder
from triptych.prompt.truncation import truncate
from triptych.types import MediaItem, Placeholder, Prompt

from .conftest import DEMO
from .test_layout import IMAGE, text_part, user

# -- plain -------------------------------------------------------------------------------------------------------------


def test_special_tokens_of_a_plain_prompt_are_real_but_for_the_placeholder(demo: PromptBuilder) -> None:
    text = "<|im_start|>user\nWhat?<|im_end|>\n"
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    assert demo.build_plain(text).token_ids == tokenizer(text)["input_ids"]
    placeholder_id = demo.tokenizer.token_to_id("<|image_pad|>")
    typed = demo.build_plain("a <|image_pad|> b")
    assert placeholder_id not in typed.token_ids
    assert demo.tokenizer.decode(typed.token_ids, skip_special_tokens=False) == "a <|image_pad|> b"
    assert typed.items == []


def test_a_tokenizer_adds_its_own_tokens_unless_told_not_to(
    sentencepiece: PromptBuilder, sentencepiece_dir: Any
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(sentencepiece_dir)
    for add in (True, False):
        ids = tokenizer("fox", add_special_tokens=add)["input_ids"]
        assert sentencepiece.build_plain("fox", add).token_ids == ids


def test_plain_tokens(demo: PromptBuilder) -> None:
    assert demo.build_plain([5, 6, 5]) == Prompt([5, 6, 5])
    placeholder_id = demo.tokenizer.token_to_id("<|image_pad|>")
    assert placeholder_id is not None
    for empty in ("", [], [5, placeholder_id]):
        with pytest.raises(BadRequestError) as caught:
            demo.build_plain(empty)
        assert caught.value.param == "prompt"


# -- going on with the last message ------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["So it", "So it  ", " \n", "", "a <|im_end|> b ", "123456"])
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("which", ["demo", "tiny"])
def test_going_on_equals_transformers(
    which: str, content: str, in_parts: bool, request: pytest.FixtureRequest, tiny_dir: Path
) -> None:
    builder: PromptBuilder = request.getfixturevalue(which)
    tokenizer = AutoTokenizer.from_pretrained(DEMO if which == "demo" else tiny_dir)
    last = [text_part("first "), text_part(content)] if in_parts else content
    messages = [*user("hi"), {"role": "assistant", "content": last}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    prompt = builder.build(messages, [], add_generation_prompt=False, continue_final_message=True)
    assert builder.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == tokenizer.decode(
        tokenizer(rendered)["input_ids"]
    )


def test_going_on_with_a_message_that_has_no_text(demo: PromptBuilder, images: list[MediaItem]) -> None:
    with pytest.raises(BadRequestError) as caught:
        demo.build(user(IMAGE), images[:1], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_going_on_where_the_template_changes_the_message(demo: PromptBuilder) -> None:
    messages = [{"role": "assistant", "content": "Hello"}]
    with pytest.raises(BadRequestError, match="does not keep"):
        demo.build(messages, [], continue_final_message=True, chat_template="{{ messages[0].content | upper }}")
    with pytest.raises(BadRequestError, match="does not keep"):
        demo.build(messages, [], continue_final_message=True, chat_template="nothing")


def test_going_on_where_the_template_prints_the_message_twice(demo: PromptBuilder) -> None:
    twice = "{{ messages[0].content }}|{{ messages[0].content }}|end"
    prompt = demo.build([{"role": "user", "content": "ab "}], [], continue_final_message=True, chat_template=twice)
    assert demo.tokenizer.decode(prompt.token_ids) == "ab |ab "


# -- a request's own template, tools and documents ---------------------------------------------------------------------


def test_a_requests_template_sees_tools_and_documents(demo: PromptBuilder) -> None:
    template = "{{ tools[0].function.name }} {{ documents[0].text }} {{ messages[0].content }}<|im_end|>"
    tools = [{"type": "function", "function": {"name": "f<|im_end|>"}}]
    documents = [{"text": "d"}]
    prompt = demo.build(
        [{"role": "user", "content": "hi"}], [], chat_template=template, tools=tools, documents=documents
    )
    assert demo.tokenizer.decode(prompt.token_ids, skip_special_tokens=False) == "f<|im_end|> d hi<|im_end|>"
    assert prompt.token_ids.count(demo.tokenizer.token_to_id("<|im_end|>") or 0) == 1, "the one of the template"


@pytest.mark.parametrize("template", ["{% if %}", "{{ 1 // 0 }}", "{{ messages.__class__.mro() }}", "{% endfor %}"])
def test_a_requests_template_that_is_wrong(demo: PromptBuilder, template: str) -> None:
    with pytest.raises(BadRequestError):
        demo.build([{"role": "user", "content": "hi"}], [], chat_template=template)


# -- truncation --------------------------------------------------------------------------------------------------------


def test_truncation_drops_whole_images_and_never_half_of_one(demo: PromptBuilder, images: list[MediaItem]) -> None:
    prompt = demo.build(user("before", IMAGE, "middle", IMAGE, "after"), [images[2], images[1]])
    size, (first, second) = len(prompt.token_ids), prompt.items
    assert (first.placeholder.length, second.placeholder.length) == (3, 2)
    assert truncate(prompt, size, "left") == truncate(prompt, size + 5, "right") == prompt

    kept = truncate(prompt, size - first.placeholder.end, "left")
    assert kept.token_ids == prompt.token_ids[first.placeholder.end :]
    (item,) = kept.items
    assert item.mm_hash == second.mm_hash
    assert item.placeholder == Placeholder(second.placeholder.offset - first.placeholder.end, 2)
    assert len(truncate(prompt, size - first.placeholder.offset, "left").items) == 2

    kept = truncate(prompt, first.placeholder.end, "right")
    assert (kept.token_ids, kept.items) == (prompt.token_ids[: first.placeholder.end], [first])
    assert truncate(prompt, first.placeholder.offset, "right").items == []

    for num_kept, side in ((size - first.placeholder.offset - 1, "left"), (first.placeholder.end - 1, "right")):
        with pytest.raises(BadRequestError) as caught:
            truncate(prompt, num_kept, side)  # type: ignore[arg-type]
        assert caught.value.param == "truncate_prompt_tokens"
