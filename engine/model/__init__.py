"""The only place that imports torch and transformers."""
