"""`baton bench eviction`: hit rates of policies that choose what leaves the store."""
