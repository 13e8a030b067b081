"""An app whose model returns scripted embeddings."""

import struct

from engine.embedding import Embedding
from router.gateway.versions import ServedVersion, Versions
from router.machine.requests import Update
from router.text.templates import DEFAULT, ChatTemplates
from router.text.tokenizer import TextModel
from tests.kits.router.gateway import (
    CONTEXT_LEN,
    EOS,
    LENGTH,
    TEMPLATE,
    TOKENIZER,
    FakeRouter,
    make_app_of,
    post,
)

NUMBERS = (3.0, 4.0, 12.0)
NESTED = Embedding(is_normalized=False, size=3, is_matryoshka=True)


def embedded(numbers=NUMBERS, **rest):
    """Returns an update with an embedding and a dummy token."""
    return Update((7,), embedding=struct.pack(f"<{len(numbers)}f", *numbers), **rest)


def app_of(router, embedding=NESTED):
    templates = ChatTemplates({DEFAULT: TEMPLATE}, {})
    text = TextModel(TOKENIZER, templates=templates, eos_token_ids=(EOS,), embedding=embedding)
    versions = Versions(ServedVersion("v1", router, text, ("tiny",), CONTEXT_LEN))
    return make_app_of(versions, router.clock)


def served(embedding=NESTED):
    return app_of(FakeRouter([embedded(outcome=LENGTH)]), embedding)


def ask(app, **body):
    return post(app, "/v1/embeddings", body)
