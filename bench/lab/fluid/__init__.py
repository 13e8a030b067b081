"""`baton bench fluid`: fluid pools beside walled pools and mixed workers, live and simulated."""
