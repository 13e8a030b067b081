"""The same router and schedulers under a virtual clock: what a cluster would do with a trace."""
