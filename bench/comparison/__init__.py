"""`baton bench simulator`: this simulator and Dynamo's on the same trace."""
