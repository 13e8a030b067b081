"""Tools of responses: what the model is offered, and its calls as clients know them."""
