# Finds cuda.h. Only the header is needed: nothing links the CUDA libraries.

# ebbtide_find_cuda_headers(VARIABLE): tries -DEBBTIDE_CUDA_INCLUDE, then a toolkit, then the PyPI package
# nvidia-cuda-runtime in the current or the building Python.
function(ebbtide_find_cuda_headers variable)
  if(EBBTIDE_CUDA_INCLUDE)
    if(NOT EXISTS "${EBBTIDE_CUDA_INCLUDE}/cuda.h")
      message(FATAL_ERROR "EBBTIDE_CUDA_INCLUDE is ${EBBTIDE_CUDA_INCLUDE}, but there is no cuda.h in it.")
    endif()
    set(candidates "${EBBTIDE_CUDA_INCLUDE}")
  else()
    set(candidates)
    foreach(home IN ITEMS "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}" /usr/local/cuda)
      if(home)
        list(APPEND candidates "${home}/include" "${home}/targets/x86_64-linux/include")
      endif()
    endforeach()
    ebbtide_python_cuda_headers(from_python)
    list(APPEND candidates ${from_python})
  endif()

  set(too_old)
  foreach(folder IN LISTS candidates)
    if(EXISTS "${folder}/cuda.h")
      file(STRINGS "${folder}/cuda.h" line REGEX "^#define CUDA_VERSION [0-9]+" LIMIT_COUNT 1)
      string(REGEX MATCH "[0-9]+" version "${line}")
      if(version GREATER_EQUAL 12000)
        message(STATUS "CUDA headers: ${folder} (CUDA_VERSION ${version})")
        set(${variable} "${folder}" PARENT_SCOPE)
        return()
      endif()
      string(APPEND too_old " Found ${folder}, but it is version ${version}.")
    endif()
  endforeach()
  message(FATAL_ERROR "cuda.h of CUDA 12.0 or newer is missing.${too_old} Install the headers with 'pip install nvidia-cuda-runtime', "
    "or install a CUDA toolkit and set CUDA_HOME, or pass -DEBBTIDE_CUDA_INCLUDE=<folder of cuda.h>.")
endfunction()

# Where the Python packages that carry the headers would put them: CUDA 13's layout first, then CUDA 12's.
function(ebbtide_python_cuda_headers variable)
  find_package(Python 3.10 QUIET COMPONENTS Interpreter)
  set(found)
  if(Python_Interpreter_FOUND)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c "import sys; print(';'.join(p for p in sys.path if p))"
      OUTPUT_VARIABLE paths OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    foreach(path IN LISTS paths)
      list(APPEND found "${path}/nvidia/cu13/include" "${path}/nvidia/cuda_runtime/include")
    endforeach()
  endif()
  set(${variable} ${found} PARENT_SCOPE)
endfunction()
