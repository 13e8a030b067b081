"""`baton top`: shows a deployment live on the whole terminal, and gives orders."""
