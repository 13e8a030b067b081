"""Figures of a simulation that are made request by request, so that no request need be kept."""
