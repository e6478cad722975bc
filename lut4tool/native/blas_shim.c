/* The CBLAS names that libmlx imports, forwarded to scipy-openblas32, whose symbols carry a `scipy_` prefix.
   Load libscipy_openblas.so first, then this, both RTLD_GLOBAL, and mlx.core last. LAPACK stays with MLX. */

#define FORWARD(name, scalar, element)                                                                             \
    void scipy_##name(int order, int trans_a, int trans_b, int m, int n, int k, scalar alpha, const element *a,    \
                      int lda, const element *b, int ldb, scalar beta, element *c, int ldc);                       \
    void name(int order, int trans_a, int trans_b, int m, int n, int k, scalar alpha, const element *a, int lda,   \
              const element *b, int ldb, scalar beta, element *c, int ldc) {                                       \
        scipy_##name(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                       \
    }

FORWARD(cblas_sgemm, float, float)
FORWARD(cblas_dgemm, double, double)
FORWARD(cblas_cgemm, const void *, void)
