"""Other engines, each driven by its own Python. `driver.py` says how."""
