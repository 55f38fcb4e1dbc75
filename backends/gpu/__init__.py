"""What the GPU backends share: kernels in one dialect, packed weights, lowering and the backend written against a thin runtime.

Not a plug-in by itself. `backends/opencl_generic` gives it a runtime.
"""
