"""The C++ kernels and their threads, kept for all tests of a process."""

from dataclasses import replace
from functools import cache

import pytest

from engine.model.native import library
from engine.model.native.matrix import Team
from engine.native_build import built_library, open_library

_FLAGS = (*library.SOURCES.flags, "-mavx2", "-mfma", "-mf16c")
AVX2 = replace(library.SOURCES, flags=tuple(f for f in _FLAGS if f != "-march=native"))


@cache
def avx2_kernels():
    """The library as a processor without AVX-512 has it."""
    return open_library(built_library(AVX2), library.SIGNATURES)


@cache
def team_of(kernels, threads):
    """The library for this processor ("best"), or without AVX-512 ("avx2"), with `threads`."""
    found = library.kernels()
    if found is None:
        pytest.skip("the C++ kernels cannot be built here")
    return Team(avx2_kernels() if kernels == "avx2" else found, threads)
