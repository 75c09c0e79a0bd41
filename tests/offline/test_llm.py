"""What `LLM.chat` and `LLM.generate` take, return and raise, on a tiny random model."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from triptych import LLM, BatchError, RequestOutput, SamplingParams
from triptych.api.chat import parse_chat
from triptych.api.fields import Caller, Served
from triptych.errors import BadRequestError, ConfigError, MalformedRequestError, MediaError, TriptychError
from triptych.kernels import library
from triptych.observe.startup import describe_worker
from triptych.offline.images import image_url
from triptych.offline.inputs import Prompt
from triptych.offline.local import LocalDeployment
from triptych.types import FinishReason

SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
RED = Image.new("RGB", (64, 64), "red")
BLUE = Image.new("RGB", (64, 64), "blue")


def ask(text: str, *images: object) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


# -- what it answers ---------------------------------------------------------------------------------------------------


def test_one_conversation_gives_one_output(llm: LLM) -> None:
    (output,) = llm.chat(ask("what is in the picture?", RED), SHORT)
    (answer,) = output.outputs
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, FinishReason.LENGTH, None)
    assert len(answer.token_ids) == 4
    assert len(output.prompt_token_ids) == output.usage.prompt_tokens > output.usage.image_tokens > 0
    assert output.usage.completion_tokens == 4
    assert 0 < output.timing.ttft_s <= output.timing.e2e_s
    assert output.prompt is None


def test_several_conversations_are_answered_in_their_order(llm: LLM) -> None:
    """More than run at once, the longest first."""
    conversations = [ask("word " * (40 - k), *[RED] * (k % 3)) for k in range(30)]
    together = llm.chat(conversations, SHORT)
    alone = [llm.chat(conversation, SHORT)[0] for conversation in conversations]
    assert token_ids(together) == token_ids(alone)
    assert llm.chat([], SHORT) == []


def test_each_conversation_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=k, ignore_eos=True) for k in (1, 5, 3)]
    outputs = llm.chat([ask("a"), ask("b"), ask("c")], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    with pytest.raises(BadRequestError, match="2 sampling_params for 3 requests"):
        llm.chat([ask("a"), ask("b"), ask("c")], params[:2])


def test_a_seed_repeats_its_draws(llm: LLM) -> None:
    def draw(seed: int | None) -> list[list[int]]:
        return token_ids(llm.chat([ask("a")] * 3, SamplingParams(seed=seed, max_tokens=8, ignore_eos=True)))

    seeded = draw(7)
    assert seeded[0] == seeded[1] == seeded[2]
    assert draw(7) == seeded
    assert draw(8) != seeded
    assert len({tuple(ids) for ids in draw(None)}) == 3


@pytest.mark.parametrize("form", ["image", "image_pil", "path", "url", "image_url"])
def test_the_forms_of_an_image_are_one_image(
    llm: LLM, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RED.save("red.png")
    forms: dict[str, dict[str, Any]] = {
        "image": {"type": "image", "image": RED},
        "image_pil": {"type": "image_pil", "image_pil": RED},
        "path": {"type": "image", "path": "red.png"},
        "url": {"type": "image", "url": image_url(RED)},
        "image_url": {"type": "image_url", "image_url": {"url": image_url(RED)}},
    }
    (output,) = llm.chat([{"role": "user", "content": [forms[form], {"type": "text", "text": "what?"}]}], SHORT)
    expected, other = llm.chat([ask("what?", RED), ask("what?", BLUE)], SHORT)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs == expected.outputs
    assert output.outputs != other.outputs, "the model sees the picture"


def test_images_keep_their_order_among_urls(llm: LLM) -> None:
    wide = BLUE.resize((160, 64))
    mixed, plain, other = ask("a", RED, image_url(wide), RED), ask("a", RED, wide, RED), ask("a", wide, RED, RED)
    outputs = llm.chat([mixed, plain, other], SHORT)
    assert outputs[0].prompt_token_ids == outputs[1].prompt_token_ids != outputs[2].prompt_token_ids
    assert outputs[0].outputs == outputs[1].outputs


def test_template_variables_reach_the_template(llm: LLM) -> None:
    with_prompt, without = llm.chat(ask("a"), SHORT)[0], llm.chat(ask("a"), SHORT, add_generation_prompt=False)[0]
    assert len(with_prompt.prompt_token_ids) > len(without.prompt_token_ids)


def test_several_choices_share_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    (output,) = llm.chat(ask("what?", RED), params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    assert output.usage.completion_tokens == 18
    for answer in output.outputs:
        assert [entry.chosen.token_id for entry in answer.logprobs] == list(answer.token_ids)
        assert all(len(entry.top) == 2 and entry.chosen.logprob < 0 for entry in answer.logprobs)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    assert output.prompt_logprobs[1] is not None
    assert output.prompt_logprobs[1].chosen.token_id == output.prompt_token_ids[1]
    (plain,) = llm.chat(ask("what?", RED), SHORT)
    assert plain.outputs[0].logprobs == plain.prompt_logprobs == ()


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    (whole,) = llm.chat(ask("a"), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    text = whole.outputs[0].text
    stop = next(letter for letter in text[2:] if letter.isascii() and letter not in text[:2])
    (output,) = llm.chat(ask("a"), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=stop))
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == (FinishReason.STOP, stop)


# -- prompts -----------------------------------------------------------------------------------------------------------

RENDERED = "<|im_start|>user\n{}what?<|im_end|>\n<|im_start|>assistant\n"
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_a_prompt_is_continued_as_it_is(llm: LLM) -> None:
    (output,) = llm.generate(RENDERED.format(""), SHORT)
    (chatted,) = llm.chat(ask("what?"), SHORT)
    assert output.prompt == RENDERED.format("")
    assert output.prompt_token_ids == chatted.prompt_token_ids
    assert output.outputs == chatted.outputs


def test_token_ids_are_a_prompt_too(llm: LLM) -> None:
    (text,) = llm.generate("what is it", SHORT)
    ids = list(text.prompt_token_ids)
    several: list[Prompt] = [ids, {"prompt_token_ids": ids}, "what is it"]
    outputs = [*llm.generate(ids, SHORT), *llm.generate(several, SHORT)]
    assert [output.prompt_token_ids for output in outputs] == [tuple(ids)] * 4
    assert all(output.outputs == text.outputs for output in outputs)
    assert [output.prompt for output in outputs] == [None, None, None, "what is it"]


def test_a_prompt_with_images_is_the_conversations(llm: LLM) -> None:
    (chatted,) = llm.chat(ask("what?", RED, BLUE), SHORT)
    text = RENDERED.format(PLACE + PLACE)
    bare = llm.generate({"prompt": RENDERED.format(""), "images": []}, SHORT)[0].prompt_token_ids
    place = llm.generate({"prompt": PLACE, "images": [RED]}, SHORT)[0].prompt_token_ids
    start, pad, end = place[0], place[1], place[-1]
    ids = list(bare)
    ids[3:3] = [start, pad, end] * 2  # after "<|im_start|>user\n"
    forms: list[Prompt] = [
        {"prompt": text, "images": [RED, BLUE]},
        {"prompt": text, "multi_modal_data": {"image": [RED, BLUE]}},
        {"prompt_token_ids": ids, "images": (image_url(RED), BLUE)},
    ]
    for output in llm.generate(forms, SHORT):
        assert output.prompt_token_ids == chatted.prompt_token_ids
        assert output.outputs == chatted.outputs
    (single,) = llm.generate({"prompt": RENDERED.format(PLACE), "multi_modal_data": {"image": RED}}, SHORT)
    assert single.outputs == llm.chat(ask("what?", RED), SHORT)[0].outputs


def test_without_images_the_placeholder_is_text(llm: LLM) -> None:
    (output,) = llm.generate("<|image_pad|>", SHORT)
    assert len(output.prompt_token_ids) > 1
    assert output.usage.image_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": PLACE, "images": [RED, RED]}, "the prompt has places for 1 images, the request has 2"),
        ({"prompt": "a", "images": [RED]}, "the prompt has places for 0 images, the request has 1"),
        ("", "the prompt has no tokens"),
        ({"prompt": None}, "`prompt` must be text or token ids"),
        ({"prompt": [1.5]}, "`prompt` must be text or token ids"),
        ([99999], "`prompt` has 99999; the model's tokens are 0 to"),
    ],
    ids=["too many images", "no place", "empty", "none", "no ids", "no token"],
)
def test_bad_prompts_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as raised:
        llm.generate(prompt, SHORT)
    assert raised.value.param == "prompt"


# -- where it is called ------------------------------------------------------------------------------------------------


async def test_it_answers_inside_a_running_event_loop(llm: LLM) -> None:
    """As in a notebook, whose cells run in one."""
    assert asyncio.get_running_loop().is_running()
    assert len(llm.chat(ask("a"), SHORT)) == 1


def test_several_threads_may_ask_at_once(llm: LLM) -> None:
    expected = token_ids(llm.chat([ask(f"number {k}") for k in range(12)], SHORT))
    with ThreadPoolExecutor(12) as pool:
        answers = pool.map(lambda k: token_ids(llm.chat([ask(f"number {k}")] * 3, SHORT)), range(12))
    assert list(answers) == [[ids] * 3 for ids in expected]


# -- progress ----------------------------------------------------------------------------------------------------------


class RecordingBar:
    def __init__(self, **options: Any) -> None:
        self.options = options
        self.num_done = 0
        self.closed = False

    def update(self, n: int, /) -> None:
        self.num_done += n

    def close(self) -> None:
        self.closed = True


def test_a_batch_moves_a_progress_bar(llm: LLM) -> None:
    bars: list[RecordingBar] = []

    def make(**options: Any) -> RecordingBar:
        bars.append(RecordingBar(**options))
        return bars[-1]

    llm.chat([ask("a")] * 3, SHORT, use_tqdm=make)
    llm.chat([ask("a")] * 3, SHORT, use_tqdm=False)
    llm.chat(ask("a"), SHORT, use_tqdm=make)
    (bar,) = bars
    assert (bar.options["total"], bar.num_done, bar.closed) == (3, 3, True)


def test_a_short_batch_shows_no_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.chat([ask("a")] * 2, SHORT)
    assert "answers" not in capsys.readouterr().err


# -- what it refuses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [{"temperature": -1.0}, {"top_p": 0}, {"top_k": "many"}, {"max_tokens": 0}, {"stop": [""]}, {"min_tokens": -1}],
    ids=lambda fields: next(iter(fields)),
)
def test_bad_values_raise_what_the_api_answers(llm: LLM, fields: dict[str, Any]) -> None:
    served = Served(llm.model_name, llm.max_model_len, llm._runtime.router.vocabulary)
    with pytest.raises(BadRequestError) as of_api:
        parse_chat({"messages": ask("a"), **fields}, served, Caller())
    with pytest.raises(BadRequestError) as offline:
        llm.chat(ask("a"), SamplingParams(**fields))
    assert type(offline.value) is type(of_api.value)
    assert (offline.value.message, offline.value.param) == (of_api.value.message, of_api.value.param)


def test_what_json_cannot_carry_is_refused(llm: LLM) -> None:
    with pytest.raises(BadRequestError, match="`temperature` must be a finite number"):
        llm.chat(ask("a"), SamplingParams(temperature=float("nan")))
    with pytest.raises(MalformedRequestError, match="not plain data"):
        llm.chat([{"role": "user", "content": [{"type": "text", "text": object()}]}])
    with pytest.raises(MalformedRequestError, match=r"`messages\.0\.content\.0` has no `image`"):
        llm.chat([{"role": "user", "content": [{"type": "image"}]}])


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("text", "`messages` must be a conversation, .*; it is of type str"),
        (None, "`messages` must be .*; it is None"),
        ({"role": "user", "content": "a"}, "`messages` must be .*; it is an object with `role`, `content`"),
        (["a"], "`messages` must be a conversation, .*; it is of type str"),
        (
            [{"role": "user", "content": [{"type": "image", "image": 5}]}],
            r"`messages\.0\.content\.0\.image` must be",
        ),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(llm: LLM, messages: Any, named: str) -> None:
    with pytest.raises(BadRequestError, match=named):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (None, "`prompt` must be text, .*; it is None"),
        (5, "`prompt` must be text, .*; it is of type int"),
        ({"prompt": "abc", "bogus": 1}, "`bogus` is not part of a prompt; there are `prompt`"),
        ({"prompt": "abc", "prompt_token_ids": [1]}, "`prompt` or `prompt_token_ids`, not both"),
        (
            {"prompt": PLACE, "images": [5]},
            r"`images\.0` must be a PIL image, a path, .* it is of type int",
        ),
        ({"prompt": PLACE, "multi_modal_data": {"video": 1}}, "`multi_modal_data` must be .*an object with `video`"),
        ({"prompt": PLACE, "multi_modal_data": [RED]}, "`multi_modal_data` must be .*of type list"),
    ],
)
def test_what_is_no_prompt_is_refused_by_name(llm: LLM, prompt: Any, named: str) -> None:
    with pytest.raises(BadRequestError, match=named):
        llm.generate(prompt)


@pytest.mark.parametrize("params", [{"temperature": 0}, [{"temperature": 0}], "greedy", 5])
def test_params_of_another_type_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(BadRequestError, match=r"`sampling_params` must be SamplingParams\(\.\.\.\) or a list of them"):
        llm.chat(ask("a"), params)


def test_unknown_options_are_type_errors(llm: LLM) -> None:
    with pytest.raises(TypeError, match="'add_generation_promt' is not an option"):
        llm.chat(ask("a"), SHORT, add_generation_promt=False)  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"^there is no setting 'blok_size'; did you mean block_size\?$"):
        LLM("demo", blok_size=16)
    with pytest.raises(ConfigError, match=r"^there is no setting 'foo'$"):
        LLM("demo", foo=1)
    with pytest.raises(ConfigError, match="no such directory"):
        LLM("/does/not/exist")
    with pytest.raises(ConfigError, match="kv_bytes=1 hold 0 KV blocks"):
        LLM("demo", kv_bytes=1)
    with pytest.raises(ConfigError, match="num_threads is for a model in this process"):
        LLM("demo", placement="EPD", num_threads=2)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_worker_says_which_kernels_run(kernels: str) -> None:
    with LLM("demo", num_kv_blocks=300, kernels=kernels) as llm:
        service = llm._runtime._service
        assert isinstance(service, LocalDeployment)
        (info,) = [worker.info for worker in service.router.registry.workers()]
    runs = "native" if kernels == "auto" and library.available() else "torch"
    assert info.kernels == {"vision": runs, "language": runs}
    assert describe_worker(info).endswith(f"kernels: vision {runs}, language {runs}")


# -- errors of one among several ---------------------------------------------------------------------------------------


def test_a_bad_conversation_is_refused_before_any_runs(llm: LLM) -> None:
    bad = [{"role": "nobody", "content": "a"}]
    with pytest.raises(BadRequestError, match=r"`messages\.0\.role`") as raised:
        llm.chat([ask("a"), bad, ask("a")], SHORT)
    assert raised.value.__notes__ == ["in number 1 of 3, counted from 0"]


def test_the_error_of_a_single_conversation_is_raised_as_it_is(llm: LLM) -> None:
    with pytest.raises(MediaError, match=r"no\.png") as raised:
        llm.chat(ask("a", "no.png"), SHORT)
    assert raised.value.param == "messages.0.content.0"


def test_a_failed_batch_keeps_what_was_finished(llm: LLM) -> None:
    with pytest.raises(BatchError, match=r"number 29 of 30 failed when \d+ were finished") as raised:
        llm.chat([ask("a")] * 29 + [ask("a", "no.png")], SHORT)
    error = raised.value
    assert isinstance(error.__cause__, MediaError)
    assert (error.index, error.status, error.param) == (29, 400, "messages.0.content.0")
    assert len(error.outputs) == 30
    assert error.outputs[29] is None
    assert error.outputs[0] is not None
    assert len(error.outputs[0].outputs[0].token_ids) == 4


def test_errors_can_be_returned_in_their_places(llm: LLM) -> None:
    asked = [ask("a"), [{"role": "nobody", "content": "a"}], ask("a", "no.png"), ask("b")]
    outcomes = llm.chat(asked, SHORT, on_error="return")
    assert [isinstance(outcome, TriptychError) for outcome in outcomes] == [False, True, True, False]
    assert "no.png" in str(outcomes[2])
    assert isinstance(outcomes[3], RequestOutput)
    assert outcomes[3].outputs == llm.chat(ask("b"), SHORT)[0].outputs


def test_a_prompt_that_is_too_long_is_an_error_of_its_own(llm: LLM) -> None:
    outcomes = llm.chat([ask("word " * 3000), ask("a")], SHORT, on_error="return")
    assert isinstance(outcomes[0], BadRequestError)
    assert isinstance(outcomes[1], RequestOutput)
