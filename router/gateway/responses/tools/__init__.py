"""Tools of responses: converts them to the model's names, and calls back to the client's names."""
