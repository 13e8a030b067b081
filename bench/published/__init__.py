"""`baton bench report`: fills the figures of documents in from the reports in `bench/results/`."""
