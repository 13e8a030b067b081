"""The pages that list models, with vLLM's fields."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from engine.clock import unix_time_s
from router.gateway.pages.replies import json_reply
from router.gateway.versions import Versions, no_model


class ModelPages:
    """Their handlers."""

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._created = unix_time_s()

    async def models(self, _: HttpRequest) -> Response:
        """GET /v1/models."""
        data = [self._model(name, length) for name, length in self._versions.models().items()]
        return json_reply(200, {"object": "list", "data": data})

    async def model(self, request: HttpRequest) -> Response:
        """GET /v1/models/{model_id}."""
        name = request.path_params["model_id"]
        max_len = self._versions.models().get(name)
        if max_len is None:
            raise no_model(name)
        return json_reply(200, self._model(name, max_len))

    def _model(self, name: str, max_len: int) -> dict[str, Any]:
        """A model. Its root is the first of its names; all are for the same weights."""
        named = (each for each in self._versions.table if name in each.model_names)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "baton",
            "root": next(named).model_names[0],
            "parent": None,
            "max_model_len": max_len,
            "permission": [
                {
                    "id": f"modelperm-{name}",
                    "object": "model_permission",
                    "created": self._created,
                    "allow_create_engine": False,
                    "allow_sampling": True,
                    "allow_logprobs": True,
                    "allow_search_indices": False,
                    "allow_view": True,
                    "allow_fine_tuning": False,
                    "organization": "*",
                    "group": None,
                    "is_blocking": False,
                }
            ],
        }
