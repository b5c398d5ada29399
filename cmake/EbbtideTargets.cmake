# Helpers for ebbtide's targets.

# ebbtide_sources(VARIABLE LAYER...): every .cpp of the named folders of csrc. A layer without sources is an error,
# because a library without that layer would still link.
function(ebbtide_sources variable)
  set(found)
  foreach(layer IN LISTS ARGN)
    file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/csrc/${layer}/*.cpp")
    if(NOT sources)
      message(FATAL_ERROR "csrc/${layer} holds no .cpp file: is the checkout whole?")
    endif()
    list(APPEND found ${sources})
  endforeach()
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

# ebbtide_configure(TARGET): includes, warnings and sanitizers that all of our own targets share. A build with the tests
# checks each index into a container. A build for a wheel, which has no tests, does not: a failed check would end the
# user's process.
function(ebbtide_configure target)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/csrc")
  target_include_directories(${target} SYSTEM PRIVATE "${cuda_include}")
  target_compile_options(${target} PRIVATE -Wall -Wextra $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor> $<$<BOOL:${EBBTIDE_WERROR}>:-Werror>)
  target_compile_definitions(${target} PRIVATE $<$<BOOL:${EBBTIDE_TESTS}>:_GLIBCXX_ASSERTIONS>)
  target_link_libraries(${target} PRIVATE Threads::Threads ${CMAKE_DL_LIBS})
  if(EBBTIDE_SANITIZE)
    # enum: a driver newer than cuda.h gives codes that its CUresult does not list.
    target_compile_options(${target} PRIVATE -fsanitize=${EBBTIDE_SANITIZE} -fno-sanitize=enum -fno-sanitize-recover=all -fno-omit-frame-pointer)
    target_link_options(${target} PRIVATE -fsanitize=${EBBTIDE_SANITIZE})
  endif()
endfunction()

# ebbtide_embed(SOURCE FILE MACRO): tells a source of csrc/kernels which file it embeds, and builds it anew when that
# changes.
function(ebbtide_embed source file macro)
  set(path "${PROJECT_SOURCE_DIR}/csrc/kernels/${file}")
  set_source_files_properties("${PROJECT_SOURCE_DIR}/csrc/kernels/${source}" PROPERTIES OBJECT_DEPENDS "${path}" COMPILE_DEFINITIONS "${macro}=\"${path}\"")
endfunction()

# ebbtide_self_contained(TARGET MAP): the library contains its own C++ runtime, needs only libc and the loader, and
# exports the names in the version script.
# A preloaded library that needs the program's copy of libstdc++ can end the program with "symbol lookup error".
function(ebbtide_self_contained target map)
  set(map_path "${PROJECT_SOURCE_DIR}/${map}")
  target_link_options(${target} PRIVATE -static-libgcc "-Wl,--version-script=${map_path}" -Wl,--as-needed)
  if(NOT EBBTIDE_SANITIZE)
    # A sanitizer's runtime comes with the program, so that its symbols stay undefined here.
    target_link_options(${target} PRIVATE -static-libstdc++)
    if(NOT target STREQUAL "_core")
      target_link_options(${target} PRIVATE -Wl,--no-undefined)
    endif()
  endif()
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS "${map_path}")
endfunction()

# Finds pybind11 through CMake, or through the Python that builds (where it is a package).
macro(ebbtide_find_pybind11)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
  set(PYBIND11_FINDPYTHON ON)
  if(NOT pybind11_DIR)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
      OUTPUT_VARIABLE ebbtide_pybind11_dir OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE ebbtide_pybind11_status)
    if(ebbtide_pybind11_status EQUAL 0)
      set(pybind11_DIR "${ebbtide_pybind11_dir}" CACHE PATH "Folder of pybind11Config.cmake" FORCE)
    endif()
  endif()
  find_package(pybind11 2.12 CONFIG QUIET)
  if(NOT pybind11_FOUND)
    message(FATAL_ERROR "pybind11 is missing. Install it for ${Python_EXECUTABLE} (pip install pybind11), or pass -DEBBTIDE_PYTHON=OFF to build without the Python module.")
  endif()
endmacro()
