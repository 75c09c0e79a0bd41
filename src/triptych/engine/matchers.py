"""The grammars of an engine's requests: which tokens each may have next, over one vocabulary for all.

The vocabulary is read at the first request with a grammar, on a thread of its own; until then such requests do not
sample. A matcher lives with its request and is made from the output so far, at whichever worker the request goes on.
"""

from __future__ import annotations

import logging
import time
from threading import Thread

import numpy as np
from numpy.typing import NDArray

from triptych.engine.grammar import GrammarMatcher, GrammarVocabulary
from triptych.engine.request_state import RequestState
from triptych.errors import EngineError

logger = logging.getLogger(__name__)


class Matchers:
    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._loading: Thread | None = None
        self._error = ""

    def may_sample(self, request: RequestState) -> bool:
        """Whether the request's tokens can be masked, if they have to be. Starts what that needs."""
        if not request.sampling.grammar:
            return True
        if self._loading is None:
            self._loading = Thread(target=self._load, name="grammar-vocabulary", daemon=True)
            self._loading.start()
        return not self._loading.is_alive()

    def _load(self) -> None:
        started_s = time.monotonic()
        try:
            self._vocabulary.load()
        except Exception as error:  # noqa: BLE001  on a thread where nobody would see it
            self._error = str(error)
        else:
            duration_s = time.monotonic() - started_s
            logger.info("tokens=%d read for grammars in %.2f s", self._vocabulary.vocab_size, duration_s)

    def mask(self, request: RequestState) -> NDArray[np.int32] | None:
        """See `GrammarMatcher.allowed`; None without a grammar. Raises GrammarError, EngineError."""
        if not request.sampling.grammar:
            return None
        if self._error:
            raise EngineError(self._error)
        output_ids = request.token_ids[request.num_prompt_tokens :]
        if request.matcher is None:
            try:
                request.matcher = GrammarMatcher.at(self._vocabulary, request.sampling.grammar, output_ids)
            except ValueError as error:
                raise EngineError(f"the output so far does not match its grammar: {error}") from error
        return request.matcher.allowed(may_end=len(output_ids) >= request.sampling.min_tokens)
