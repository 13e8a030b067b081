"""The kernels of a model on its device: attention, the way to attend long rows, and sampling."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.clock import MonotonicClock
from engine.layout import KVFormat
from engine.model.attention import cuda as triton_attention
from engine.model.attention import plain as torch_attention
from engine.model.attention.base import Attend
from engine.model.attention.choice import KERNELS, AttendBy, PrefillTrial
from engine.model.attention.kvcache import KVCache
from engine.model.attention.prefill import Way, all_ways
from engine.model.loading.checkpoint import LoadedModel
from engine.model.sampling import choosing
from engine.model.sampling import cuda as triton_sampling
from engine.model.sampling.changes import TokenChoice

log = logging.getLogger(__name__)

Sampler = Callable[[torch.Tensor, Sequence[TokenChoice]], torch.Tensor]


class DeviceKernels:
    """Chooses the kernels of one model, and counts the optional parts that this device lacks."""

    def __init__(
        self, loaded: LoadedModel, *, attend: Attend | None, sampler: Sampler | None
    ) -> None:
        """`attend` and `sampler` are chosen for the device unless given."""
        self._loaded = loaded
        self._device = loaded.device
        self._is_cuda = loaded.device.type == "cuda"
        self._attend = attend
        self._sampler = sampler
        self._way: Way | None = None
        # Name of the attention. The name of the way for long rows is added if it differs.
        self.attention = ""
        self.fallbacks: Counter[str] = Counter()

    def open_attention(self, cache: KVCache) -> tuple[Attend, bool]:
        """Returns the attention, with the fastest way for long rows. Also returns True if this
        attention supports rows that only pad a batch.
        """
        attend, can_pad = self.choose_attend()
        if attend is triton_attention.attend:
            self._way = self.choose_way(cache)
            attend = partial(triton_attention.attend, prefill=self._way)
        return attend, can_pad

    def close(self) -> None:
        """Closes the way to attend long rows."""
        if self._way is not None:
            self._way.close()
            self._way = None

    def choose_attend(self) -> tuple[Attend, bool]:
        """Chooses the attention. Also returns True if this attention supports rows that only pad a
        batch.
        """
        if self._attend is not None:
            self.attention = "given"
            return self._attend, True
        if self._is_cuda and triton_attention.available():
            self.attention = KERNELS
            return triton_attention.attend, True
        if self._is_cuda:
            self.fall_back("triton", "it is not installed; attention is slow without it")
        self.attention = "torch"
        return torch_attention.attend, False

    def choose_way(
        self, cache: KVCache, ways: Sequence[Way] | None = None, attend: AttendBy | None = None
    ) -> Way | None:
        """Measures the ways to attend long rows, and opens the fastest way. Returns None if the
        Triton kernels are fastest.

        The ways need a record in bf16, and a model that computes in bf16.
        """
        config = self._loaded.model.config.get_text_config(decoder=True)
        trial = PrefillTrial(
            cache,
            num_heads=config.num_attention_heads,
            context_len=self._loaded.context_len,
            attend=attend or triton_attention.attend,
            clock=MonotonicClock(),
        )
        is_bf16 = cache.kv_format is KVFormat.BF16 and self._loaded.model.dtype is torch.bfloat16
        if not is_bf16 or not trial.is_possible:
            log.info("prefill attention: %s", KERNELS)
            return None
        wanted = [way for way in ways or all_ways() if way.is_available(self._device)]
        choice = trial.choose(wanted)
        log.info("prefill attention: %s", choice)
        for name, why in choice.failures.items():
            self.fall_back(f"prefill_{name}", why)
        if choice.name == KERNELS:
            return None
        self.attention = f"{KERNELS}, {choice.name}"
        way = next(way for way in wanted if way.name == choice.name)
        way.open(self._device)
        return way

    def choose_sampler(self) -> Sampler:
        """Chooses the sampler, and compiles its kernel."""
        if self._sampler is not None or not self._is_cuda:
            return self._sampler or choosing.sample
        if not triton_attention.available():
            self.fall_back("triton_sampling", "triton is not installed")
            return choosing.sample
        dtypes = {self._loaded.model.dtype, torch.float32}  # changed logits are in fp32
        try:
            triton_sampling.warm_up(self._loaded.vocab_size, dtypes, self._device)
        except Exception as error:  # a compiler may raise anything; then torch samples
            self.fall_back("triton_sampling", error)
            return choosing.sample
        return triton_sampling.sample

    def fall_back(self, what: str, why: object) -> None:
        """Counts and logs a part without which the model runs."""
        self.fallbacks[what] += 1
        log.warning("%s is not used: %s", what, why)
