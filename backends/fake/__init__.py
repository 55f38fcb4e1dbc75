"""An accelerator made of host memory: finds missing copies, missing waits and reads of what nobody wrote."""
