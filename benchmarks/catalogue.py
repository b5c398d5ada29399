"""Every workload and every limit, by the name of its file.

A new file in workloads/ or limits/ needs a line here; a new baseline one in baselines/__init__.py.
"""

from collections.abc import Callable
from importlib import import_module

from benchmarks.measured import Part
from benchmarks.sizes import Sizes


def _load(folder: str, names: str) -> dict[str, Callable[[Sizes], list[Part]]]:
    return {name: import_module(f"benchmarks.{folder}.{name}").parts for name in names.split()}


LIMITS = _load("limits", "link driver_calls device_read host_touch host_copy direct_io zero_copy")
# In the order in which they run: the most important first.
WORKLOADS = _load(
    "workloads",
    "first_pause prepared_pause copy_ahead steady unchanged no_backup swap early_kernel forward disk malloc "
    "overflow_read host_chunks run_spike run_generate run_overhead run_pauseable jax_preallocation threads "
    "hidden_costs small_tags share hand_over trainer_and_engine curve "
    "lms_programs lms_parallel lms_blocks lms_weights lms_fits lms_resnet lms_states lms_trainer lms_largest "
    "lms_finetune copy_tuning",
)
# Those that only run where they are named.
ON_DEMAND = ("copy_tuning", "lms_finetune", "lms_largest", "lms_parallel", "lms_programs")

# The limits that a workload is held against, besides the link.
NEEDS = {
    "first_pause": ["host_touch"],
    "copy_ahead": ["device_read"],
    "unchanged": ["device_read"],
    "no_backup": ["driver_calls"],
    "swap": ["host_copy"],
    "disk": ["direct_io"],
    "overflow_read": ["zero_copy", "device_read"],
    "run_generate": ["zero_copy"],
    "threads": ["host_touch"],
    "lms_blocks": ["link"],
    "lms_weights": ["link"],
    "lms_resnet": ["link"],
    "lms_states": ["link"],
    "lms_trainer": ["link"],
}
# Other workloads that a workload is held against.
COMPARED_WITH = {"prepared_pause": ["first_pause"], "copy_ahead": ["first_pause"], "unchanged": ["steady"]}
