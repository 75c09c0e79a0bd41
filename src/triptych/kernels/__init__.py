"""Kernels for processors with AVX-512 and bf16 products, or AMX too: whole layers in C++, one call each.

The sources are in `csrc/`; built with the package where there is a compiler; they know neither Python nor torch.
"""
