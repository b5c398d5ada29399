"""Values that settings refuse, and the one sentence for each: at run time, in doctor, in `ebbtide run`, on stderr."""

SIZE = 'must be a size like "16GiB" or "512MiB", not'

# Variable -> a value and what is said of it, after the variable's name.
BAD_VARIABLES = {
    "EBBTIDE_DRIVER": ("gpu", " must be one of auto, cuda, hip, sim, off, not 'gpu'"),
    "EBBTIDE_OVERFLOW": ("foo", " must be one of split, managed, whole, none, not 'foo'"),
    "EBBTIDE_DEVICE_LIMIT": ("nonsense", f" {SIZE} 'nonsense'"),
    "EBBTIDE_DEVICE_MARGIN": ("1GiB less", f" {SIZE} '1GiB less'"),
    "EBBTIDE_HOST_LIMIT": (
        "16G",
        " has the unknown unit 'G' (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB); write 16GiB or 16GB",
    ),
    "EBBTIDE_HOST_MARGIN": ("-1GiB", " must not be negative: '-1GiB'"),
    "EBBTIDE_HOST_POOL": ("99999999TiB", " is beyond any memory: '99999999TiB'"),
    "EBBTIDE_RESERVE": (".5GiB", f" {SIZE} '.5GiB'"),
    "EBBTIDE_REPORT": ("all", " must be one of device, free, total, not 'all'"),
    "EBBTIDE_PAUSEABLE": ("yes", " must be 0 or 1, not 'yes'"),
    "EBBTIDE_PAUSEABLE_ALL": ("all", " must be 0 or 1, not 'all'"),
    "EBBTIDE_TAG": ("a\u200bb", ": a tag has no characters that can't be seen, and 'a\u200bb' has U+200B"),
    "EBBTIDE_BACKUP": ("tape", " must be one of ram, pinned, disk, none, not 'tape'"),
    "EBBTIDE_LMS": ("16 gigs", " has the unknown unit 'gigs' (B, KiB, MiB, GiB, TiB, KB, MB, GB, TB)"),
    "EBBTIDE_LMS_MIN_SIZE": ("small", f" {SIZE} 'small'"),
    "EBBTIDE_LMS_RECOMPUTE": ("all", " must be one of auto, none, not 'all'"),
    "EBBTIDE_LMS_OVERFLOW": ("split", " must be 0 or 1, not 'split'"),
    "EBBTIDE_COMPAT": ("sglang", " must be one of none, tms, not 'sglang'"),
    "EBBTIDE_SUMMARY": ("2", " must be 0 or 1, not '2'"),
    "EBBTIDE_SHARED": ("always", " must be 0 or 1, not 'always'"),
    "EBBTIDE_LOG": ("loud", " must be one of error, warning, info, debug, not 'loud'"),
    "EBBTIDE_PINNED_LIMIT": ("1 2", f" {SIZE} '1 2'"),
    "EBBTIDE_SHARED_HANDLE": ("5.GiB", f" {SIZE} '5.GiB'"),
    "EBBTIDE_DISK_FILES": ("visible", " must be one of hidden, named, not 'visible'"),
    "EBBTIDE_POISON": ("0xEB", " must be 0 or 1, not '0xEB'"),
    "EBBTIDE_CLEAR_HANDED": ("0xEB", " must be 0 or 1, not '0xEB'"),
    "EBBTIDE_COPY_AHEAD": ("0xEB", " must be 0 or 1, not '0xEB'"),
    "EBBTIDE_SKIP_CLEAN": ("true", " must be 0 or 1, not 'true'"),
    "EBBTIDE_SKIP_UNUSED": ("on", " must be 0 or 1, not 'on'"),
    "EBBTIDE_SKIP_CONSTANT": ("\x1b[0m", " must be 0 or 1, not '\\x1b[0m'"),
    "EBBTIDE_COPY_THREADS": ("-3", " must be a whole number from 1 to 256, not '-3'"),
    "EBBTIDE_CHECK": ("x" * 60, f" must be 0 or 1, not '{'x' * 40}...'"),
    "EBBTIDE_VLLM": ("maybe", " must be 0 or 1, not 'maybe'"),
    "EBBTIDE_SIM_DEVICES": ("many", " must be a whole number from 0 to 64, not 'many'"),
    "EBBTIDE_SIM_CAPACITY": ("lots", f" {SIZE} 'lots'"),
    "EBBTIDE_SIM_HIP": ("yes", " must be 0 or 1, not 'yes'"),
    "EBBTIDE_SIM_QUIRKS": ("odd", " must be one of none, held, stale, late, handles, host, all, not 'odd'"),
    "EBBTIDE_SIM_SHARED": ("a/b", ": '*' and '/' are reserved in tags: 'a/b'"),
}
# Any text is a path. What is there is another matter.
PATHS = {"EBBTIDE_LEDGER", "EBBTIDE_CACHE_DIR", "EBBTIDE_DISK_DIRECTORY", "EBBTIDE_SHARED_FOLDER"}


def bad_values() -> dict[str, str]:
    """An environment of nothing but them."""
    return {variable: value for variable, (value, _) in BAD_VARIABLES.items()}


def sentences() -> dict[str, str]:
    """What is said of each."""
    return {variable: variable + words for variable, (_, words) in BAD_VARIABLES.items()}
