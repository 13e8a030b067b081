"""Access to the API: keys, the file that holds them, their limits, and the guard."""
