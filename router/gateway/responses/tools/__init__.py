"""Tools of responses: the model's view of them, and calls under the clients' names."""
