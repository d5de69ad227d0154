#define DSLIDE_VECTOR_BYTES 32
#define DSLIDE_MR 6
#define DSLIDE_KERNELS kAvx2
#define DSLIDE_NAME "avx2"
#include "kernels.inc"
