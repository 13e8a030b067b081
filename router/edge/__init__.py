"""What stands between the network and an application: limits, TLS, and an orderly end."""
