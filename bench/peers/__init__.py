"""Other engines and servers. Each runs in its own Python environment, driven as in `driver.py`."""
