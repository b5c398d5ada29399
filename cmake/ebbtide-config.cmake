# find_package(ebbtide) gives the target ebbtide::ebbtide of an installed package. `ebbtide --cmake-dir` prints the
# folder of this file.
get_filename_component(_ebbtide_package "${CMAKE_CURRENT_LIST_DIR}/.." ABSOLUTE)
if(NOT TARGET ebbtide::ebbtide)
  add_library(ebbtide::ebbtide SHARED IMPORTED)
  set_target_properties(ebbtide::ebbtide PROPERTIES
    IMPORTED_LOCATION "${_ebbtide_package}/libebbtide.so"
    IMPORTED_SONAME libebbtide.so
    INTERFACE_INCLUDE_DIRECTORIES "${_ebbtide_package}/include")
endif()
unset(_ebbtide_package)
