"""The C++ kernels and their threads, kept for all tests of a process."""

from functools import cache

import pytest

from engine.model.native import library
from engine.model.native.matrix import Team

AVX2 = tuple(
    flag
    for flag in (*library.SOURCES.flags, "-mavx2", "-mfma", "-mf16c")
    if flag != "-march=native"
)


@cache
def avx2_kernels():
    """The library as a processor without AVX-512 has it."""
    return library.opened(AVX2)


@cache
def team_of(kernels, threads):
    """The library for this processor ("best"), or without AVX-512 ("avx2"), with `threads`."""
    found = library.kernels()
    if found is None:
        pytest.skip("the C++ kernels cannot be built here")
    return Team(avx2_kernels() if kernels == "avx2" else found, threads)
