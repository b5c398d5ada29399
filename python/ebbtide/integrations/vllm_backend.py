"""The backend "ebbtide" of vLLM's sleep mode. vLLM imports this module when it is selected (vLLM 0.26 or newer)."""

from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from ebbtide import driver_choice
from ebbtide.errors import StateError
from ebbtide.integrations import vllm, vllm_allocator


class EbbtideBackend(SleepModeBackend):
    """Sleeps and wakes vLLM's memory in ebbtide's pools.

        backend = EbbtideBackend()
        backend.suspend(level=1)
        backend.resume()

    Level 1 keeps the weights and drops the KV cache; level 2 drops both. What vLLM calls "runtime" and "cudagraph" is
    kept at every level. A failed call leaves the state as it was, and nothing moved.

    Raises:
        StateError: made in a process whose vLLM allocates elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        if not vllm.is_in_use():
            raise StateError(
                "vLLM has allocated with its own allocator, and this backend can't move that memory: "
                "start vLLM with EBBTIDE_VLLM=1"
            )
        self._allocator = vllm_allocator.allocator()

    def suspend(self, level: int = 1) -> None:
        """Takes all memory off the device."""
        kept = vllm_allocator.KEPT_AT_EVERY_LEVEL
        self._allocator.sleep(offload_tags=("weights", *kept) if level == 1 else kept)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        """Brings back everything, or `tags` and the memory that vLLM never defers."""
        before, self._state = self._state, "RESUMING"
        try:
            self._allocator.wake_up(tags)
        except BaseException:
            self._state = before
            raise
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        """Drops the content of `tags` and frees their memory."""
        self._allocator.discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def is_supported(cls) -> bool:
        """Whether ebbtide is on."""
        return not driver_choice.is_off()

    @classmethod
    def preserves_communicators(cls) -> bool:
        """Communicators have their buffers outside of the pools."""
        return True

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        """Kernels and modules stay where they are, since only the pools' memory leaves."""
        return True

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        """Addresses do not change, and communicators are not rebuilt."""
        return True
