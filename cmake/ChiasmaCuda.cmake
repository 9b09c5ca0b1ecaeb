# Decides whether the CUDA kernels are built. Sets CHIASMA_ENABLE_CUDA, and with it the CUDA language and the interface
# target chiasma_cuda_options, which every library of .cu files links.
set(CHIASMA_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO (where a fitting nvcc is found), ON (or fail), OFF")
set_property(CACHE CHIASMA_CUDA PROPERTY STRINGS AUTO ON OFF)
set(CHIASMA_CUDA_MINIMUM 12.8)

set(CHIASMA_ENABLE_CUDA OFF)
if(CHIASMA_CUDA STREQUAL "AUTO" OR CHIASMA_CUDA)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    # The toolkit's installers leave PATH alone.
    find_program(CHIASMA_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(CHIASMA_NVCC)
    if(CHIASMA_NVCC)
      set(CMAKE_CUDA_COMPILER ${CHIASMA_NVCC})
    endif()
  endif()
  # 90a, not 90: wgmma and setmaxnreg exist only in the architecture-specific target.
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a-real)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL CHIASMA_CUDA_MINIMUM)
      set(CHIASMA_ENABLE_CUDA ON)
    endif()
  endif()
endif()

if(CHIASMA_ENABLE_CUDA)
  message(STATUS "CUDA kernels: yes, nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
  find_package(CUDAToolkit REQUIRED)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  add_library(chiasma_cuda_options INTERFACE)
  # -std by hand: CMake 3.25 does not know that nvcc has C++20. ptxas -v prints registers, spills and serialised wgmma.
  target_compile_options(chiasma_cuda_options INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;-Xptxas=-v;-lineinfo;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>")
elseif(CHIASMA_CUDA STREQUAL "AUTO" OR NOT CHIASMA_CUDA)
  message(STATUS "CUDA kernels: no (CHIASMA_CUDA=${CHIASMA_CUDA}, nvcc: ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION})")
else()
  message(FATAL_ERROR "CHIASMA_CUDA is ON, but no nvcc >= ${CHIASMA_CUDA_MINIMUM} was found (found: "
                      "'${CMAKE_CUDA_COMPILER}' ${CMAKE_CUDA_COMPILER_VERSION}). Put it on PATH, set CUDACXX, or use CHIASMA_CUDA=AUTO.")
endif()
