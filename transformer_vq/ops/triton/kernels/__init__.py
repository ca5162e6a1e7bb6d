"""Triton kernels: plain pointers to contiguous tensors; constants in capitals.

B is b * h, the rows of keys and values; each has G query heads. A segment has `n_blocks` blocks of
`n_query` tokens; the block before each one has L tokens. Sizes need not be powers of two: tiles
overhang and are masked.
"""
