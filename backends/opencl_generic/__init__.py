"""opencl_generic: any device with an OpenCL driver, through pyopencl."""
