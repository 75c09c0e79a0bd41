"""The language part of a model: transformers' text model without its cache, and the head on the rows that sample.

Held by `engine/runner.py` in prefill and decode workers, loaded by `models/weights.py`.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional


class LanguageModel(nn.Module):
    """Token embedding, decoder layers and norm in `model`, and the head, which may be the token embedding."""

    def __init__(self, model: nn.Module, *, tied: bool) -> None:
        super().__init__()
        self.model = model
        embedding = self.embedding
        self.head = None if tied else nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)

    @property
    def embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.model.embed_tokens)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] token ids to [T, hidden]."""
        return functional.embedding(token_ids, self.embedding.weight)

    def untie_head(self) -> None:
        """Give a tied head a layer of its own, on the same weight, so that it can be swapped."""
        if self.head is None:
            embedding = self.embedding
            with torch.device("meta"):
                head = nn.Linear(embedding.embedding_dim, embedding.num_embeddings, bias=False)
            head.weight = embedding.weight
            self.head = head.eval()

    def forward(self, embeds: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Hidden rows [T, hidden] of packed rows [T, hidden] at rotary positions [3, T].

        `kwargs` reach the attention function and, where a family has it, deepstack.
        """
        output = self.model(inputs_embeds=embeds[None], position_ids=positions[:, None], use_cache=False, **kwargs)
        return cast(torch.Tensor, output.last_hidden_state[0])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]."""
        if self.head is None:
            return functional.linear(hidden, self.embedding.weight).float()
        return cast(torch.Tensor, self.head(hidden)).float()
