"""Models: the only package that imports torch and transformers."""
