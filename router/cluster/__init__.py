"""The cluster from the view of one gateway, and the cost of work on its workers. Pure."""
