"""The pages other than the answer endpoints: state, models, tokens, and error replies."""
