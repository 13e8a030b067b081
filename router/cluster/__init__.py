"""The cluster as one gateway sees it, and what work costs on its workers. Pure."""
