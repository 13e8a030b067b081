"""The C++ kernels and their threads, kept for all tests of a process."""

from functools import cache

import pytest

from engine.model.native import library
from engine.model.native.matrix import Team
from engine.native_build import FLAGS, built_library, open_library

AVX2_FLAGS = tuple(
    flag for flag in (*FLAGS, "-mavx2", "-mfma", "-mf16c") if flag != "-march=native"
)


@cache
def team_of(kernels, threads):
    """The library for this processor ("best"), or without AVX-512 ("avx2"), with `threads`."""
    found = library.kernels()
    if found is None:
        pytest.skip("the C++ kernels cannot be built here")
    if kernels == "avx2":
        found = open_library(built_library(library.SOURCES, AVX2_FLAGS), library.SIGNATURES)
    return Team(found, threads)
