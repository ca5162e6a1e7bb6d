"""Attention as pure functions of tensors.

Names (the paper's symbol, the name in the code, what it is):

    T            seq_len           tokens per sequence
    L            block_len         tokens per block, and length of the window
    R            n_blocks          blocks in the input
    S            n_code            codewords
    D_m D_k D_v  d_model d_k d_v   widths
    tau          tau               score scale, sqrt(d_k)
    z            z                 shortcodes: the codeword of each key
    C            codebook          the codewords, [h, s, k]
    C_z, K-hat   k_hat             quantized keys
    Delta        one-hot of z      never formed; `code_sums` computes its products
    U(n) / L(n)  CacheStats.mean   mean value per code
    L(n)         CacheStats.count  tokens per code
    B            by_distance       positional scores, one per distance up to L, farthest first
    W            weights           attention weights

Axes, the same letters in every einsum:

    b batch   h key/value head   g query head of that key head   r block
    i query   j key   s code   k key width   v value width   t token   d distance
"""
