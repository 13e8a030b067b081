"""`baton top`: a deployment on a whole terminal, live, with orders."""
