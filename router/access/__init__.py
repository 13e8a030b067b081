"""Who may use the API: keys, the file that holds them, and the guard in front of the API."""
