"""The store's object tier: blocks in an object store, which outlive the cluster. Off by default."""
