"""Log-probabilities as the API gives them: natural, of the whole vocabulary, from logits that nothing has changed.

In float32 and row by row, so that a row's do not depend on the rows beside it. Called by `sampler.py` for sampled
tokens and by `runner.py` for those of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triptych.messages import Logprobs


@torch.inference_mode()
def score(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[Logprobs]:
    """Of one token a row of `logits` [rows, vocabulary] float32, and of the row's `num_top` likeliest tokens.

    A token's rank is one more than the number of tokens that are likelier; equal ones are in the order of their ids.
    """
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    _, likeliest = ranked(logits, min(max(num_top, 0), logits.shape[1]))
    ranks = (1 + (logits > logits.gather(1, chosen)).sum(-1)).tolist()
    tokens = torch.cat((chosen, likeliest), dim=1)
    logprobs = logits.log_softmax(-1).gather(1, tokens)
    return [Logprobs(*row) for row in zip(tokens.tolist(), logprobs.tolist(), ranks, strict=True)]


def ranked(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest values of each row and their places, in descending order, equal ones by place."""
    values, places = values.topk(count, dim=-1)
    places, order = places.sort(dim=-1)
    values, descending = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, places.gather(1, descending)
