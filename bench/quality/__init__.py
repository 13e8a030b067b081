"""`baton bench quality`: what KV and weight formats cost in quality."""
