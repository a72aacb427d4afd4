"""The parts of `python -m benchmarks.device_check`: what can be known of the kernels only where there is a GPU."""
