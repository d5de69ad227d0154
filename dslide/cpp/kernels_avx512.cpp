#define DSLIDE_VECTOR_BYTES 64
#define DSLIDE_MR 8
#define DSLIDE_KERNELS kAvx512
#define DSLIDE_NAME "avx512"
#include "kernels.inc"
