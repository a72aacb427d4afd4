// Code that a CPU thread and a GPU thread share: nvcc compiles it for the device, a C++ compiler for the host.
#pragma once

#ifdef __CUDACC__
#define DATC_DEVICE __device__
#else
#define DATC_DEVICE
#endif
