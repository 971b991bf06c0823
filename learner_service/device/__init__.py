"""The device: choice, precision and CUDA graphs."""
