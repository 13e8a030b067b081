"""Models: the computation of steps. The only package that imports torch and transformers."""
