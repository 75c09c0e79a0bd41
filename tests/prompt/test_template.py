"""Chat templates: found where checkpoints keep them, rendered as transformers renders them, harmless when they fail."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from triptych.errors import BadRequestError, ConfigError
from triptych.prompt.layout import PromptBuilder
from triptych.prompt.template import ChatTemplate

from .conftest import DEMO

TURN: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
CHATS: list[list[dict[str, Any]]] = [
    TURN,
    [{"role": "system", "content": "Be <b>brief</b> & 'kind'."}, *TURN, {"role": "assistant", "content": "Hi!"}],
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}, {"type": "image"}]}],
    [{"role": "assistant", "content": "", "name": None, "tool_calls": [{"function": {"arguments": {"ü": [1]}}}]}],
]
TEMPLATES = [
    (DEMO / "chat_template.jinja").read_text(),
    """
    {% for message in messages %}
        {% if message.name is defined %}named{% endif %}
        {% if loop.index0 > 5 %}{% break %}{% endif %}
        {{ message | tojson }} {{ message.content | tojson(indent=2) }} {{ namespace(a=1).a }}
    {% endfor %}
    {% if tools %}{{ tools | tojson }}{% else %}no tools{% endif %}
    {% if add_generation_prompt %}go{% endif %}{{ greeting | default('none') }}{{ bos_token }}
    """,
    "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_equal_to_transformers(source: str, chat: list[dict[str, Any]], generate: bool) -> None:
    kwargs: dict[str, Any] = {"greeting": "hey", "tools": [{"type": "function", "function": {"name": "f"}}]}
    # transformers drops keys without a value one layer above this function.
    present = [{key: value for key, value in message.items() if value is not None} for message in chat]
    for variables in ({}, kwargs):
        expected = render_jinja_template(
            conversations=[present], chat_template=source, add_generation_prompt=generate, bos_token="<s>", **variables
        )
        assert ChatTemplate(source, {"bos_token": "<s>"}).render(chat, generate, **variables) == expected[0][0]


def test_where_checkpoints_keep_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        ChatTemplate.load(tmp_path)
    settings: dict[str, Any] = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "extra_special_tokens": {"image_token": "<image>"},
        "chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ eos_token }}"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ChatTemplate.load(tmp_path).render(TURN, True) == "</s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": "{{ bos_token }}"}))
    assert ChatTemplate.load(tmp_path).render(TURN, True) == "<s>"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json {{ image_token }}"}))
    assert ChatTemplate.load(tmp_path).render(TURN, True) == "json <image>"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert ChatTemplate.load(tmp_path).render(TURN, True) == "jinja"


@pytest.mark.parametrize("content", ["{% if %}", "{{ a", "{% generation %}"])
def test_a_template_that_cannot_work_is_found_at_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "chat_template.jinja").write_text(content)
    with pytest.raises(ConfigError, match="chat template, line"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_settings(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ raise_exception('x' * 10000) }}", "xxx"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for k in range(10000000) %}{% endfor %}", "Range too big|range"),
    ],
)
def test_errors_are_the_requests(source: str, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason) as caught:
        ChatTemplate(source).render(TURN, True)
    assert len(str(caught.value)) <= 300


def test_variables_cannot_replace_the_messages_of_a_call() -> None:
    template = ChatTemplate("{{ messages[0].content }}{{ bos_token }}{{ strftime_now('%Y') }}", {"bos_token": "<s>"})
    assert template.render(TURN, False, unused=1) == f"hello<s>{datetime.now():%Y}"


def test_the_packaged_template_tells_of_tools_and_calls_and_is_what_it_was_without(demo: PromptBuilder) -> None:
    messages = [{"role": "user", "content": "hi"}]
    plain = demo.template.render(messages, True)
    assert plain == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    tools = [{"type": "function", "function": {"name": "f"}}]
    rendered = demo.template.render(
        [*messages, {"role": "assistant", "content": "so", "tool_calls": [call]}], True, tools=tools
    )
    assert rendered.startswith('<|im_start|>system\n{"type": "function", "function": {"name": "f"}}\n')
    assert 'so\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call><|im_end|>\n' in rendered
