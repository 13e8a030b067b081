"""Services that run in processes of their own: a worker, a gateway, and how each is opened."""
