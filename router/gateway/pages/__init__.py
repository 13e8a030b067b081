"""The pages beside the answer endpoints: state, models, tokens, and the answers to errors."""
