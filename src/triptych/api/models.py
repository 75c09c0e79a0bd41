"""`/v1/models` and `/v1/models/{id}`: the one model that is served."""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from triptych.api.body import json_response
from triptych.api.seam import RouterLike
from triptych.errors import NotFoundError


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int  # seconds of the epoch
    root: str
    max_model_len: int  # prompt and output, in tokens
    object: Literal["model"] = "model"
    owned_by: str = "triptych"
    parent: None = None


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


def routes(router: RouterLike) -> list[Route]:
    created = int(time.time())

    def card() -> ModelCard:
        return ModelCard(router.model_name, created, router.model_name, router.max_model_len)

    async def models(request: Request) -> Response:
        return json_response(ModelList([card()]))

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != router.model_name:
            why = f"The model `{name[:200]}` does not exist; `{router.model_name}` does."
            raise NotFoundError(why, param="model")
        return json_response(card())

    return [Route("/v1/models", models), Route("/v1/models/{name:path}", model)]
