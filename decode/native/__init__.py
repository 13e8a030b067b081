"""Matches of n-grams in C++: see `ngrams`.

It is built on first use with the machine's compiler (`engine.native_build`) and called through
ctypes. Without a compiler `decode.ngram` does the same in Python.
"""
