"""Compiles Triton kernels for a Hopper GPU, on a machine without one."""

import re
import subprocess
from pathlib import Path

import torch

HOPPER_SHARED_BYTES = 232448  # shared memory limit of one program, in bytes
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_for_hopper(kernel, arguments, constants):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = dict(constants)
    options = {
        name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants
    }
    signature = dict.fromkeys(constants, "constexpr")
    attributes = {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, torch.Tensor) or ("stride" in name and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    signature = {name: signature[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def bytes_on_stack(compiled, folder):
    """Returns the bytes of registers that each thread spills to memory."""
    import triton

    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run(
        [tool, "-res-usage", binary], capture_output=True, text=True, check=True
    ).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])
