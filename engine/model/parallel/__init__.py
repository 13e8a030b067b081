"""Models that span several devices: slices of layers, stages, and the steps that all ranks
compute.
"""
