"""`baton bench quality`: the loss of quality by KV formats and weight formats."""
