"""What every Baton process shares: types, messages, KV layout, blocks, sequences, the step loop."""
