"""HIP's names in csrc/driver/functions.def, and its numbers in hip_attributes.def, agree with the headers of HIP in the
wheel of triton (`make programs`)."""

import re
import subprocess
from pathlib import Path

from checks.names import read_driver_functions, read_hip_functions
from checks.program_wheels import NOT_THERE, unpack
from checks.toolchain import find_cuda_include

# Two functions of one name and other arguments, of which C++ can't tell which is meant.
OVERLOADED = {
    "hipMallocAsync": "void**, size_t, hipStream_t",
    "hipMallocFromPoolAsync": "void**, size_t, hipMemPool_t, hipStream_t",
}
PROGRAM = """#define __HIP_PLATFORM_AMD__
#define __HIP_DISABLE_CPP_FUNCTIONS__
#include <cuda.h>
#include <hip/hip_runtime_api.h>
#include <cstddef>
#include <type_traits>
static_assert(HIP_VERSION_MAJOR >= 6);
template <typename A, typename B>
constexpr bool alike = sizeof(A) == sizeof(B) && std::is_floating_point_v<A> == std::is_floating_point_v<B> &&
                       std::is_class_v<A> == std::is_class_v<B>;
template <typename A, typename B>
constexpr bool same = false;
template <typename R, typename... A, typename S, typename... B>
constexpr bool same<R(A...), S(B...)> = [] {
  if constexpr (sizeof...(A) == sizeof...(B)) return (alike<R, S> && ... && alike<A, B>);
  return false;
}();
static_assert(sizeof(hipMemAllocationProp) == sizeof(CUmemAllocationProp));
static_assert(sizeof(hipMemAccessDesc) == sizeof(CUmemAccessDesc));
static_assert(offsetof(hipMemAllocationProp, location) == offsetof(CUmemAllocationProp, location));
static_assert(offsetof(hipMemAllocationProp, allocFlags) == offsetof(CUmemAllocationProp, allocFlags));
static_assert(sizeof(hipUUID) == sizeof(CUuuid) && sizeof(hipIpcMemHandle_t) == sizeof(CUipcMemHandle));
"""
# Constants of CUDA that csrc uses, and HIP's.
VALUES = """
CUDA_ERROR_INVALID_VALUE hipErrorInvalidValue
CUDA_ERROR_OUT_OF_MEMORY hipErrorOutOfMemory
CUDA_ERROR_NOT_INITIALIZED hipErrorNotInitialized
CUDA_ERROR_DEINITIALIZED hipErrorDeinitialized
CUDA_ERROR_NO_DEVICE hipErrorNoDevice
CUDA_ERROR_INVALID_DEVICE hipErrorInvalidDevice
CUDA_ERROR_INVALID_CONTEXT hipErrorInvalidContext
CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED hipErrorPeerAccessAlreadyEnabled
CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED hipErrorHostMemoryAlreadyRegistered
CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED hipErrorHostMemoryNotRegistered
CUDA_ERROR_CONTEXT_IS_DESTROYED hipErrorContextIsDestroyed
CUDA_ERROR_NOT_READY hipErrorNotReady
CUDA_ERROR_ILLEGAL_ADDRESS hipErrorIllegalAddress
CUDA_ERROR_NOT_SUPPORTED hipErrorNotSupported
CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED hipErrorStreamCaptureUnsupported
CUDA_ERROR_STREAM_CAPTURE_INVALIDATED hipErrorStreamCaptureInvalidated
CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD hipErrorStreamCaptureWrongThread
CU_MEM_ALLOCATION_TYPE_PINNED hipMemAllocationTypePinned
CU_MEM_LOCATION_TYPE_DEVICE hipMemLocationTypeDevice
CU_MEM_LOCATION_TYPE_HOST hipMemLocationTypeHost
CU_MEM_LOCATION_TYPE_HOST_NUMA hipMemLocationTypeHostNuma
CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR hipMemHandleTypePosixFileDescriptor
CU_MEM_ACCESS_FLAGS_PROT_READWRITE hipMemAccessFlagsProtReadWrite
CU_MEM_ALLOC_GRANULARITY_RECOMMENDED hipMemAllocationGranularityRecommended
CU_MEMHOSTALLOC_PORTABLE hipHostMallocPortable
CU_MEMHOSTREGISTER_PORTABLE hipHostRegisterPortable
CU_MEMHOSTREGISTER_DEVICEMAP hipHostRegisterMapped
CU_STREAM_NON_BLOCKING hipStreamNonBlocking
CU_STREAM_CAPTURE_MODE_RELAXED hipStreamCaptureModeRelaxed
CU_STREAM_CAPTURE_STATUS_NONE hipStreamCaptureStatusNone
CU_STREAM_CAPTURE_STATUS_INVALIDATED hipStreamCaptureStatusInvalidated
CU_STREAM_WAIT_VALUE_GEQ hipStreamWaitValueGte
CU_EVENT_DISABLE_TIMING hipEventDisableTiming
CU_POINTER_ATTRIBUTE_MEMORY_TYPE HIP_POINTER_ATTRIBUTE_MEMORY_TYPE
CU_POINTER_ATTRIBUTE_RANGE_START_ADDR HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR
CU_MEMORYTYPE_HOST hipMemoryTypeHost
CU_MEMORYTYPE_DEVICE hipMemoryTypeDevice
"""
ATTRIBUTES = {
    "COMPUTE_CAPABILITY_MAJOR": "ComputeCapabilityMajor",
    "COMPUTE_CAPABILITY_MINOR": "ComputeCapabilityMinor",
    "KERNEL_EXEC_TIMEOUT": "KernelExecTimeout",
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": "CanUseHostPointerForRegisteredMem",
    "PCI_BUS_ID": "PciBusId",
    "PCI_DEVICE_ID": "PciDeviceId",
    "PCI_DOMAIN_ID": "PciDomainID",
    "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "VirtualMemoryManagementSupported",
}


def write_checks(root: Path) -> str:
    lines = [PROGRAM]
    for name, (hip, how) in read_hip_functions(root / "csrc/driver/functions.def").items():
        if how != "same":
            continue
        theirs = f"hipError_t({OVERLOADED[hip]})" if hip in OVERLOADED else f"decltype(::{hip})"
        lines.append(f'static_assert(same<decltype(::{name}), {theirs}>, "{name} and {hip}");')
    lines += [
        f"static_assert(int({ours}) == int({theirs}));" for ours, theirs in map(str.split, VALUES.strip().splitlines())
    ]
    text = (root / "csrc/driver/hip_attributes.def").read_text()
    numbers = dict(re.findall(r"^EBBTIDE_HIP_ATTRIBUTE\((\w+), (\d+)\)$", text, re.MULTILINE))
    assert numbers.keys() == ATTRIBUTES.keys()
    lines += [f"static_assert(hipDeviceAttribute{ATTRIBUTES[name]} == {number});" for name, number in numbers.items()]
    return "\n".join(lines) + "\n"


def compile_errors(source: str, include: Path, folder: Path) -> list[str]:
    file = folder / "check.cpp"
    file.write_text(source)
    command = ["c++", "-std=c++20", "-fsyntax-only", f"-I{include}", f"-I{find_cuda_include()}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in done.stderr.splitlines() if "error:" in line]


def test_every_function_has_a_name_in_hip(root: Path) -> None:
    listed = read_driver_functions(root / "csrc/driver/functions.def")
    named = read_hip_functions(root / "csrc/driver/functions.def")
    assert named.keys() == listed.keys()
    assert all(hip.startswith("hip") and how in ("same", "adapted") for hip, how in named.values())


@NOT_THERE
def test_what_is_the_same_is_the_same_in_hips_headers(root: Path, tmp_path: Path) -> None:
    include = unpack("triton", tmp_path, ".h") / "triton/backends/amd/include"
    source = write_checks(root)
    assert compile_errors(source, include, tmp_path) == []
    wrong = source + "static_assert(same<decltype(::cuStreamWaitValue32), decltype(::hipStreamWaitValue32)>);\n"
    assert len(compile_errors(wrong, include, tmp_path)) == 1
