"""Converts KV records between formats on a GPU, as `kvtransfer.formats` does on a CPU.

Records are bytes at an address in this process; `engine.layout` defines them. A conversion runs a
few kernels over all heads of a section, queued on the caller's stream. torch allocates the memory
of these kernels on the same stream. So it reuses the memory only after the kernels have ended.

On a CPU the same code computes immediately, for tests.
"""

import ctypes

import msgspec
import torch

from engine.layout import SCALE_BYTES, KVFormat, KVLayout
from engine.model.attention.kvcache import ELEMENT_DTYPES, dequantise, quantise


class TorchConverter:
    """A `RecordConverter` for records in the memory of one device."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._room = torch.empty(0, dtype=torch.uint8)
        self._results: list[torch.Tensor] = []  # the last two results; this list keeps them alive

    def room(self, num_bytes: int, stream: int) -> int:
        """Returns the address of memory for the input records; valid until the next call."""
        if self._room.numel() < num_bytes:
            with self._on(stream):
                self._room = self._new(num_bytes)
        return self._room.data_ptr()

    @torch.inference_mode()
    def convert(
        self, address: int, num_records: int, layout: KVLayout, to: KVFormat, stream: int
    ) -> int:
        """Queues a conversion. Returns the address of the result, which stays valid during the next
        call.
        """
        with self._on(stream):
            num_bytes = num_records * layout.block_bytes
            source = self._at(address, num_bytes).view(num_records, layout.block_bytes)
            result = self._converted(source, layout, to)
        self._results = [*self._results[-1:], result]
        return result.data_ptr()

    def _converted(self, source: torch.Tensor, layout: KVLayout, to: KVFormat) -> torch.Tensor:
        """Returns records [n, block_bytes] in the format `to`, with zeros as padding."""
        wanted = msgspec.structs.replace(layout, kv_format=to)
        size = (len(source), wanted.block_bytes)
        result = torch.zeros(size, dtype=torch.uint8, device=source.device)
        for index in range(len(layout.sections)):
            elements, scales = _parts(source, layout, index)
            numbers = dequantise(elements, scales, layout.kv_format)
            for there, made in zip(
                _parts(result, wanted, index), quantise(numbers, to), strict=True
            ):
                if there is not None:
                    there.copy_(made)
        return result

    def _at(self, address: int, num_bytes: int) -> torch.Tensor:
        """Returns the bytes at an address as a tensor, without copying them."""
        if self._device.type == "cpu":
            memory = (ctypes.c_ubyte * num_bytes).from_address(address)
            return torch.frombuffer(memory, dtype=torch.uint8)
        return torch.as_tensor(_AtAddress(address, num_bytes), device=self._device)

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _on(self, stream: int) -> torch.cuda.StreamContext:
        """Returns a context in which work is queued on the stream. On a CPU the context does
        nothing.
        """
        if self._device.type == "cpu":
            return torch.cuda.stream(None)
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=self._device))


class _AtAddress:
    """Bytes in a GPU's memory, in a form that torch can use without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def _parts(
    records: torch.Tensor, layout: KVLayout, index: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns views of a section for `dequantise`: elements [n, heads, block_size, head_dim], and
    scales [n, heads, block_size].
    """
    begin, end = layout.section_offset_bytes(index), layout.section_offset_bytes(index + 1)
    heads = records[:, begin:end].unflatten(1, (-1, layout.head_bytes(index)))
    tokens = layout.block_size
    elements = heads[..., : tokens * layout.token_bytes(index)]
    elements = elements.view(ELEMENT_DTYPES[layout.kv_format]).unflatten(2, (tokens, -1))
    if not layout.kv_format.has_scales:
        return elements, None
    first = layout.scales_offset_bytes(index)
    scales = heads[..., first : first + tokens * SCALE_BYTES]
    return elements, scales.view(
        torch.int32 if layout.kv_format is KVFormat.INT4 else torch.float32
    )
