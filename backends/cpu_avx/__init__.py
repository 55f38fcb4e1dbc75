"""cpu_avx: the CPU backend. `plugin.py` is what the loader finds; native code is loaded when a device is probed or opened."""
