"""Parts of rewriting a schema for its compiler: patterns, endless parts, spellings of keys."""
