"""Text of many streams in one call of C++."""
