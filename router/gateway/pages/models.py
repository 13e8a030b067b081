"""The pages that list models, with vLLM's fields."""

from typing import Literal

from msgspec import Struct
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from engine.clock import unix_time_s
from router.gateway.pages.replies import json_reply
from router.gateway.versions import Versions, no_model


class ModelPermission(Struct, kw_only=True):
    """Constant: clients of vLLM expect it."""

    id: str
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ShownModel(Struct, kw_only=True):
    """A model. `max_model_len` is in tokens, of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "baton"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: list[ModelPermission]


class ModelList(Struct):
    """All models."""

    data: list[ShownModel]
    object: Literal["list"] = "list"


class ModelPages:
    """The handlers of the model pages."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._created = unix_time_s()

    def routes(self) -> list[Route]:
        """Returns the routes of all handlers."""
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{model_id:path}", self.model),
        ]

    async def models(self, _: HttpRequest) -> Response:
        """GET /v1/models."""
        data = [self._model(name, length) for name, length in self._versions.models().items()]
        return json_reply(200, ModelList(data))

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model_id}."""
        name = request.path_params["model_id"]
        max_len = self._versions.models().get(name)
        if max_len is None:
            raise no_model(name)
        return json_reply(200, self._model(name, max_len))

    def _model(self, name: str, max_len: int) -> ShownModel:
        """Returns a model for the list.

        Its `root` is the first name of the version that has this name.
        """
        named = (each for each in self._versions.table if name in each.model_names)
        return ShownModel(
            id=name,
            created=self._created,
            root=next(named).model_names[0],
            max_model_len=max_len,
            permission=[ModelPermission(id=f"modelperm-{name}", created=self._created)],
        )
