"""Makes the text of many streams in one call of C++."""
