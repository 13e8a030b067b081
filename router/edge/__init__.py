"""The edge between the network and an application: limits, TLS, and an orderly shutdown."""
