"""The trainer of the bundled model, `engine/model/bundled` (see its MODEL_CARD.md)."""
