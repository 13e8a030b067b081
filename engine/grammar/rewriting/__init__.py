"""Parts of the rewriting of a schema for its compiler: patterns, endless parts, spellings of
keys.
"""
