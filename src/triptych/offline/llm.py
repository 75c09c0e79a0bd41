"""`LLM`: the engine behind the HTTP API, for a script or a notebook.

Calls wait in the caller's thread; everything else runs on threads of its own, so a caller may have an event loop.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar, Unpack, get_type_hints, overload

from triptych.api.fields import Served
from triptych.config import Config, by_section, load
from triptych.errors import BadRequestError, ConfigError, TriptychError
from triptych.launch import ENVIRONMENT, Deployment
from triptych.offline.inputs import (
    ChatOptions,
    Conversation,
    Prompt,
    PromptOptions,
    Question,
    chat_question,
    conversations_of,
    prompt_question,
    prompts_of,
)
from triptych.offline.outputs import BatchError, RequestOutput
from triptych.offline.params import SamplingParams
from triptych.offline.runtime import Runtime, Service
from triptych.placement import Placement

T = TypeVar("T")
OnError = Literal["raise", "return"]
Sampling = SamplingParams | Sequence[SamplingParams] | None

NO_DEADLINE_S = 1e9  # nobody gives up waiting
BAR_DELAY_S = 1.0  # shorter batches show no progress bar


class Bar(Protocol):
    """What is used of a tqdm bar."""

    def update(self, n: int, /) -> object: ...

    def close(self) -> object: ...


UseTqdm = bool | Callable[..., Bar]


class LLM:
    """A model that answers in this process.

    `model` is the directory of a checkpoint, or "demo" for the packaged one. `num_threads` is how many threads compute:
    one is right where others use the machine, more are faster where its cores are idle. `placement`, such as
    "1E/1P/1D", starts worker processes instead. Every setting of `docs/configuration.md` is a keyword, `dtype` or
    `max_num_seqs` say, over those of `config_file`. Raises ConfigError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "demo",
        *,
        num_threads: int = 1,
        placement: str = "",
        config_file: str | os.PathLike[str] | None = None,
        **settings: str | float,
    ) -> None:
        given = by_section({"deadline_s": NO_DEADLINE_S, "log_level": "warning", "port": 0, **settings})
        given.setdefault("model", {})["path"] = os.fspath(model)
        config = load(None if config_file is None else Path(config_file), given)
        self._runtime = Runtime(_service(config, placement, num_threads), config)
        self._abandon = weakref.finalize(self, self._runtime.abandon)
        self._abandon.atexit = False  # the runtime ends itself then, and before multiprocessing waits for children

    def close(self) -> None:
        """Cancel what runs and give everything back. Idempotent; leaving a `with` block does it too."""
        self._abandon.detach()
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def model_name(self) -> str:
        return self._runtime.router.model_name

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output, in tokens."""
        return self._runtime.router.max_model_len

    # -- questions -----------------------------------------------------------------------------------------------------

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Sampling = None,
        *,
        use_tqdm: UseTqdm = True,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Sampling = None,
        *,
        use_tqdm: UseTqdm = True,
        on_error: Literal["return"],
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput | TriptychError]: ...

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Sampling = None,
        *,
        use_tqdm: UseTqdm = True,
        on_error: OnError = "raise",
        **options: Unpack[ChatOptions],
    ) -> Any:
        """Answer one conversation or several, in their order. Contents are the HTTP API's, and images as Python has
        them: `{"type": "image", "image": a PIL image, a path, bytes or a URL}`.

        The first error ends the call: BadRequestError before anything runs; later what happened to one conversation,
        or BatchError when there are several. With `on_error="return"` an error stands in its conversation's place.
        """
        _check_names(options, ChatOptions)
        return self._ask(conversations_of(messages), chat_question, sampling_params, options, use_tqdm, on_error)

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling = None,
        *,
        use_tqdm: UseTqdm = True,
        on_error: Literal["raise"] = "raise",
        **options: Unpack[PromptOptions],
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling = None,
        *,
        use_tqdm: UseTqdm = True,
        on_error: Literal["return"],
        **options: Unpack[PromptOptions],
    ) -> list[RequestOutput | TriptychError]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Sampling = None,
        *,
        use_tqdm: UseTqdm = True,
        on_error: OnError = "raise",
        **options: Unpack[PromptOptions],
    ) -> Any:
        """Continue one prompt or several, which no chat template touches: text, token ids, or
        `{"prompt": text or token ids, "images": [...]}` with the model's placeholder for each image.

        Errors are as in `chat`.
        """
        _check_names(options, PromptOptions)
        return self._ask(prompts_of(prompts), prompt_question, sampling_params, options, use_tqdm, on_error)

    def _ask(
        self,
        asked: Sequence[T],
        read: Callable[[T, Mapping[str, Any], Served], Question],
        sampling_params: Sampling,
        options: Mapping[str, Any],
        use_tqdm: UseTqdm,
        on_error: OnError,
    ) -> Sequence[RequestOutput | TriptychError]:
        router = self._runtime.router
        served = Served(router.model_name, router.max_model_len, router.vocabulary, trust_chat_template=True)
        outcomes: dict[int, RequestOutput | TriptychError] = {}
        questions: dict[int, Question] = {}
        for index, (one, params) in enumerate(zip(asked, _one_each(sampling_params, len(asked)), strict=True)):
            try:
                questions[index] = read(one, {**params.body(), **options}, served)
            except TriptychError as error:
                if on_error == "raise":
                    error.add_note(f"in number {index} of {len(asked)}, counted from 0")
                    raise
                outcomes[index] = error
        with self._runtime.answers(questions) as answers, closing(_bar(use_tqdm, len(questions))) as bar:
            for answer in answers:
                outcomes[answer.number] = answer.outcome
                if on_error == "raise" and isinstance(answer.outcome, TriptychError):
                    raise _batch_error(answer.outcome, answer.number, outcomes, len(asked))
                bar.update(1)
        return [outcomes[index] for index in range(len(asked))]


def _service(config: Config, placement: str, num_threads: int) -> Service:
    if not placement:
        # For torch, if it comes now: large pages let weights be read a third faster.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", ENVIRONMENT["THP_MEM_ALLOC_ENABLE"])
        from triptych.offline.local import LocalDeployment

        return LocalDeployment(config, num_threads)
    if num_threads != 1:
        raise ConfigError("num_threads is for a model in this process; workers of a placement have a thread each")
    return Deployment(config, Placement.parse(placement))


def _check_names(options: Mapping[str, object], known: type) -> None:
    for name in options:
        if name not in get_type_hints(known):
            raise TypeError(f"{name!r} is not an option here")


def _one_each(params: Sampling, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise BadRequestError(
            f"`sampling_params` must be SamplingParams(...) or a list of them; it is of type {type(params).__name__}.",
            param="sampling_params",
        )
    if len(params) != count:
        raise BadRequestError(f"{len(params)} sampling_params for {count} requests", param="sampling_params")
    return params


def _batch_error(
    error: TriptychError, index: int, outcomes: Mapping[int, RequestOutput | TriptychError], count: int
) -> TriptychError:
    if count == 1:
        return error
    finished = [outcomes.get(k) for k in range(count)]
    batch_error = BatchError(error, index, [out if isinstance(out, RequestOutput) else None for out in finished])
    batch_error.__cause__ = error
    return batch_error


def _bar(use_tqdm: UseTqdm, total: int) -> Bar:
    """A progress bar that a long batch shows, in the notebook's form where there is a notebook."""
    if not use_tqdm or total < 2:
        return _NoBar()
    make = import_module("tqdm.auto").tqdm if isinstance(use_tqdm, bool) else use_tqdm
    bar: Bar = make(total=total, desc="answers", delay=BAR_DELAY_S, miniters=1)
    return bar


class _NoBar:
    def update(self, n: int, /) -> None:
        return None

    def close(self) -> None:
        return None
