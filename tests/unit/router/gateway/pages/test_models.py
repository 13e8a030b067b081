"""The model list of a gateway."""

from tests.kits.router.gateway import CONTEXT_LEN, FakeRouter, get, make_app


def test_models_are_listed_and_found():
    app = make_app(FakeRouter(), model_names=("tiny", "org/tiny"))
    listed = get(app, "/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/tiny"]
    model = get(app, "/v1/models/org/tiny").json()
    assert model in listed["data"]
    missing = get(app, "/v1/models/gpt-9")
    assert (missing.status, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_has_the_fields_of_vllm():
    app = make_app(FakeRouter(), model_names=("tiny", "org/tiny"))
    model = get(app, "/v1/models/org/tiny").json()
    created, (permission,) = model.pop("created"), model.pop("permission")
    assert model == {
        "id": "org/tiny",
        "object": "model",
        "owned_by": "baton",
        "root": "tiny",
        "parent": None,
        "max_model_len": CONTEXT_LEN,
    }
    assert permission["object"] == "model_permission"
    assert permission["created"] == created
    assert permission["allow_sampling"]
