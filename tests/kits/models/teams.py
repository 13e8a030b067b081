"""The C++ kernels and their threads, shared by all tests of a process."""

from functools import cache

from engine.model.native.matrix import Team
from engine.native.build import kernel_units
from engine.native.library import library


@cache
def avx2_kernels():
    """Returns the kernel library for a processor without AVX-512."""
    return library(kernel_units("-march=x86-64-v3"))


@cache
def team_of(kernels, threads):
    """Returns the library for this processor ("best") or for AVX2 only ("avx2"), with `threads`."""
    return Team(avx2_kernels() if kernels == "avx2" else library(), threads)
