"""Every environment variable that ebbtide reads: one list, for the documentation and `ebbtide doctor`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """One variable. `default` is what holds while it is unset, in words where it is no plain value."""

    name: str
    default: str
    meaning: str


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "EBBTIDE_DRIVER",
        "auto",
        "auto (CUDA, or the simulated device where torch is a CPU build), cuda, sim (the simulated device for CPU "
        "tensors, with every build of torch), or off (every call is a no-op).",
    ),
    Setting(
        "EBBTIDE_DEVICE_LIMIT",
        "no limit",
        'The most that ebbtide, or a preloaded program, may hold on a device ("16GiB" or bytes). '
        "saver.configure(device_limit=) goes before it.",
    ),
    Setting(
        "EBBTIDE_HOST_LIMIT",
        "no limit but RAM and the container's",
        "The most host memory that ebbtide may hold. saver.configure(host_limit=) goes before it.",
    ),
    Setting(
        "EBBTIDE_HOST_MARGIN",
        "1 GiB or a sixteenth of RAM, the smaller",
        "Host memory that ebbtide leaves to others. saver.configure(host_margin=) goes before it.",
    ),
    Setting(
        "EBBTIDE_PINNED_LIMIT",
        "no limit",
        "The most pinned memory, for rings and pinned backups. saver.configure(pinned_limit=) goes before it.",
    ),
    Setting(
        "EBBTIDE_OVERFLOW",
        "split",
        "What a preloaded program gets where the device has too little: split (the rest of the allocation on the "
        "host), managed (managed memory), whole (all of a large allocation on the host), or none (out of memory).",
    ),
    Setting(
        "EBBTIDE_RESERVE",
        "512 MiB or a sixteenth of the device, the smaller",
        "Device memory that spills and promotions leave free; allocations of up to 2 MiB may use half of it. "
        "saver.configure(reserve=) goes before it.",
    ),
    Setting(
        "EBBTIDE_WHOLE_FRACTION",
        "0.6",
        'overflow="whole": the share of the free device memory above which an allocation lies on the host. '
        "saver.configure(whole_fraction=) goes before it.",
    ),
    Setting(
        "EBBTIDE_HOST_POOL",
        "0",
        "Host memory that is made ahead and kept for spills. saver.configure(host_pool=) goes before it.",
    ),
    Setting(
        "EBBTIDE_SHARED_HANDLE",
        "1 GiB",
        "Segments of a tag that lie side by side come back behind one driver handle of at most this size; 0: each has "
        "its own. saver.configure(shared_handle=) goes before it.",
    ),
    Setting(
        "EBBTIDE_LEDGER",
        "none: each process counts for itself",
        "The file in which the processes of one run count the host memory that they hold; the first makes it. "
        "`ebbtide run` names it.",
    ),
    Setting("EBBTIDE_SUMMARY", "0", "1: totals of what went to the host, on stderr, when a process ends."),
    Setting(
        "EBBTIDE_PRELOAD",
        "1",
        "0: the preload library, where LD_PRELOAD loads it, hands every call on. `ebbtide run` sets 1.",
    ),
    Setting(
        "EBBTIDE_REPORT",
        "device",
        "What a preloaded program is told of device memory: device (the truth), free (free grows by what the host has "
        "left, up to the total), total (both grow).",
    ),
    Setting(
        "EBBTIDE_PAUSEABLE",
        "0",
        "1: a preloaded program is pauseable: all that it allocates on a device has a tag.",
    ),
    Setting("EBBTIDE_TAG", "default", "The tag of a pauseable program's allocations."),
    Setting(
        "EBBTIDE_BACKUP",
        "ram",
        "Where a pauseable program's allocations go in a pause: ram, pinned, disk, or none (what they hold is lost).",
    ),
    Setting(
        "EBBTIDE_DISK_DIRECTORY",
        "$TMPDIR, else /var/tmp",
        "The folder of disk backups: on a disk, not on tmpfs. saver.configure(disk_directory=) goes before it.",
    ),
    Setting(
        "EBBTIDE_SKIP_CLEAN",
        "1",
        "0: a pause also copies blocks that did not change since their backup was made. "
        "saver.configure(skip_clean=) goes before it.",
    ),
    Setting(
        "EBBTIDE_SKIP_UNUSED",
        "1",
        "0: a pause also copies blocks that torch holds free. saver.configure(skip_unused=) goes before it.",
    ),
    Setting(
        "EBBTIDE_SKIP_CONSTANT",
        "1",
        "0: a pause also copies blocks of one repeated value. saver.configure(skip_constant=) goes before it.",
    ),
    Setting(
        "EBBTIDE_COMPARE_BYTES",
        "0",
        "1: where a digest says that nothing changed, bytes are copied and compared all the same. "
        "saver.configure(compare_bytes=) goes before it.",
    ),
    Setting(
        "EBBTIDE_COPY_THREADS",
        "from the cores that the process may use",
        "How many threads copy between a backup and the staging ring.",
    ),
    Setting(
        "EBBTIDE_CHECK",
        "0",
        "1: before each torch op, its tensors are looked at; one that is paused is a StateError instead of a crash.",
    ),
    Setting("EBBTIDE_LOG", "warning", "What is said on stderr: error, warning or info."),
    Setting(
        "EBBTIDE_CACHE_DIR",
        "$XDG_CACHE_HOME/ebbtide, else ~/.cache/ebbtide",
        "Where the torch extension of the simulated device is kept once it is built.",
    ),
    Setting("EBBTIDE_SIM_DEVICES", "1", "How many simulated devices there are."),
    Setting("EBBTIDE_SIM_CAPACITY", "1 GiB", 'The memory of each simulated device, as "512MiB" or bytes.'),
    Setting("EBBTIDE_SIM_LIBRARY", "libebbtide_sim.so beside libebbtide.so", "The file of the simulated driver."),
)
