"""The bundled model: a tiny Python-code model that lets everything run offline (MODEL_CARD.md)."""
