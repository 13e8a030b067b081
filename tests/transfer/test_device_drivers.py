"""The contract of the device drivers: the fake driver, and CUDA's driver over a fake library.

The fake library has CUDA's functions and host memory, so without a GPU only the calls are tested.
With a GPU the same tests run on the GPU.
"""

import ctypes
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.native.build import find_compiler
from kvtransfer.device import cuda_driver
from kvtransfer.device.cuda_driver import CudaDriver, DeviceCopy, DriverError, SharedAddress
from tests.kits.fakes import device as fakes
from tests.kits.fakes.device import LateDriver

NUM_BYTES = 4096


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Builds the fake library with CUDA's functions, whose memory counts as a device's."""
    source = Path(fakes.__file__).with_name("libcuda.cpp")
    built = tmp_path_factory.mktemp("cuda") / "libcuda.so.1"
    command = [find_compiler(), "-shared", "-fPIC", "-o", str(built), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return built


class Bench:
    """A driver, and an allocation in the memory of its device."""

    def __init__(self, driver, address, keep):
        self.driver = driver
        self.address = address
        self.keep = keep


@pytest.fixture(params=["late", "cuda's form", pytest.param("cuda", marks=pytest.mark.gpu)])
def bench(request, library, monkeypatch):
    if request.param == "cuda":
        import torch

        memory = torch.zeros(NUM_BYTES, dtype=torch.uint8, device="cuda:0")
        torch.cuda.synchronize()
        driver, address = CudaDriver(0), memory.data_ptr()
    else:
        memory = np.zeros(NUM_BYTES, np.uint8)
        address = memory.ctypes.data
        driver = LateDriver()
        if request.param == "cuda's form":
            monkeypatch.setattr(cuda_driver, "LIBRARY", str(library))
            ctypes.CDLL(str(library)).fake_allocation(
                ctypes.c_uint64(address - 64), ctypes.c_uint64(NUM_BYTES + 64)
            )
            driver = CudaDriver(1)
    driver.enter()
    driver.enter()
    yield Bench(driver, address, memory)
    driver.close()


def ended(driver, mark) -> int:
    """Polls until the mark is done. Returns the number of polls before that."""
    for questions in range(10_000):
        if driver.is_done(mark):
            return questions
    raise AssertionError("it never ends")


def test_bytes_go_to_the_device_and_back(bench):
    there, back = bench.driver.pinned(NUM_BYTES), bench.driver.pinned(NUM_BYTES)
    there[:] = np.arange(NUM_BYTES) % 251
    back[:] = 0
    bench.driver.copy([DeviceCopy(bench.address, there.ctypes.data, NUM_BYTES)])
    first = bench.driver.mark()
    bench.driver.copy([DeviceCopy(back.ctypes.data, bench.address + 100, NUM_BYTES - 100)])
    second = bench.driver.mark()
    bench.driver.wait(second)
    assert np.array_equal(back[:-100], there[100:])
    ended(bench.driver, first)


def test_the_end_of_copies_is_asked_for(bench):
    memory = bench.driver.pinned(64)
    bench.driver.copy([DeviceCopy(bench.address, memory.ctypes.data, 64)])
    mark = bench.driver.mark()
    ended(bench.driver, mark)
    again = bench.driver.mark()
    bench.driver.wait(again)


def test_foreign_handles_are_refused(bench):
    for handle in (b"", b"x" * 64):
        with pytest.raises(DriverError):
            bench.driver.map(SharedAddress(handle, 0), 16)


def test_calls_of_cudas_form_share_and_map_memory(library, monkeypatch):
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(library))
    counts = ctypes.CDLL(str(library))
    memory = np.zeros(NUM_BYTES, np.uint8)
    base = memory.ctypes.data
    counts.fake_allocation(ctypes.c_uint64(base), ctypes.c_uint64(NUM_BYTES))
    driver = CudaDriver(0)
    driver.enter()
    shared = driver.share(base + 256)
    assert shared.offset == 256
    assert driver.map(shared, NUM_BYTES - 256) == base + 256
    assert counts.fake_num_open() == 1
    with pytest.raises(DriverError, match="smaller than its layout says"):
        driver.map(shared, NUM_BYTES)
    assert counts.fake_num_open() == 1
    driver.unmap(base + 256)
    assert counts.fake_num_open() == 0
    driver.map(shared, 16)
    driver.pinned(100)
    driver.close()
    assert (counts.fake_num_open(), counts.fake_num_pinned()) == (0, 0)


def test_an_error_names_the_call(library, monkeypatch):
    monkeypatch.setattr(cuda_driver, "LIBRARY", str(library))
    with pytest.raises(DriverError, match=r"cuDeviceGet: some error \(101\)"):
        CudaDriver(5).enter()


READER = """
import sys
import numpy as np
from kvtransfer.device.cuda_driver import CudaDriver
from kvtransfer.device.cuda_driver import DeviceCopy, SharedAddress
driver = CudaDriver(0)
driver.enter()
address = driver.map(SharedAddress(bytes.fromhex(sys.argv[1]), int(sys.argv[2])), 4096)
here = driver.pinned(4096)
driver.copy([DeviceCopy(here.ctypes.data, address, 4096)])
driver.wait(driver.mark())
print(int(here.astype(np.int64).sum()))
driver.unmap(address)
driver.close()
"""


@pytest.mark.gpu
def test_another_process_reads_the_memory_of_a_gpu():
    import torch

    memory = torch.full((NUM_BYTES,), 3, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    driver = CudaDriver(0)
    driver.enter()
    shared = driver.share(memory.data_ptr())
    words = [sys.executable, "-c", READER, shared.handle.hex(), str(shared.offset)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=100)
    assert done.stdout.strip() == str(3 * NUM_BYTES), done.stderr
    driver.close()
